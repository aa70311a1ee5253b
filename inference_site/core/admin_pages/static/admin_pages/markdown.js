// Text of a model as Markdown. The text is data of a stranger: its HTML is shown as text, what is
// made of it is sanitised, and its images are links, because loading one could send the conversation
// to the address in it.
import { copy } from "./copy.js";
import hljs from "./vendor/highlight.js";
import { Marked } from "./vendor/marked.js";
import DOMPurify from "./vendor/purify.js";

const MOST_HIGHLIGHTED = 50_000;
/** Rendering takes at most this part of the time while a text grows. */
const RENDERING_PART = 0.2;

function escaped(text) {
  const element = document.createElement("span");
  element.textContent = text;
  return element.innerHTML;
}

const markdown = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ block, text }) => (block ? `<p>${escaped(text)}</p>` : escaped(text)),
    image({ href, text }) {
      return `<a href="${escaped(href).replaceAll('"', "&quot;")}">${escaped(text || href)}</a>`;
    },
    heading({ tokens, depth }) {
      const level = Math.min(6, depth + 2); // The page and the answer have the levels above.
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
  },
});
const SANITISED = {
  ALLOWED_TAGS: [
    ..."a blockquote br code del em h3 h4 h5 h6 hr input li ol p pre strong".split(" "),
    ..."table tbody td th thead tr ul".split(" "),
  ],
  ALLOWED_ATTR: ["align", "checked", "class", "disabled", "href", "start", "title", "type"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** Return the object or array that a text is; undefined if it is anything else. */
function jsonOf(text) {
  if (!/^\s*[[{]/.test(text)) return undefined;
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** Show JSON laid out and highlighted. */
export function showJson(element, value) {
  const text = JSON.stringify(value, null, 2);
  if (text.length > MOST_HIGHLIGHTED) element.textContent = text;
  else element.innerHTML = hljs.highlight(text, { language: "json" }).value; // It escapes the text.
}

function codeBlock(pre) {
  const code = pre.querySelector("code") ?? pre;
  const [, language = ""] = /language-(\S+)/.exec(code.className) ?? [];
  const text = code.textContent;
  if (hljs.getLanguage(language) && text.length <= MOST_HIGHLIGHTED) {
    code.innerHTML = hljs.highlight(text, { language }).value;
  }
  const block = document.createElement("div");
  block.className = "code-block";
  const bar = document.createElement("p");
  bar.className = "code-bar";
  const control = document.createElement("button");
  control.type = "button";
  control.className = "button-plain";
  control.textContent = "Copy";
  control.setAttribute("aria-label", `Copy this ${language || "code"} block`);
  control.addEventListener("click", async () => {
    await copy(text);
    control.textContent = "Copied";
  });
  bar.append(language, control);
  pre.replaceWith(block);
  pre.tabIndex = 0;
  block.append(bar, pre);
}

function rendered(text) {
  const fragment = DOMPurify.sanitize(markdown.parse(text), SANITISED);
  for (const link of fragment.querySelectorAll("a")) {
    if (!link.hasAttribute("href")) link.replaceWith(...link.childNodes); // It was not allowed.
    else Object.assign(link, { target: "_blank", rel: "noopener noreferrer nofollow" });
  }
  for (const table of fragment.querySelectorAll("table")) {
    const scroll = document.createElement("div");
    Object.assign(scroll, { className: "table-scroll", tabIndex: 0 });
    table.replaceWith(scroll);
    scroll.append(table);
  }
  for (const box of fragment.querySelectorAll("input")) {
    if (box.type === "checkbox") box.setAttribute("aria-label", box.parentElement.textContent.trim());
    else box.remove();
  }
  return fragment;
}

/** A text that grows in an element; Markdown unless the reader wants it as it came. */
export class MarkdownText {
  #element;
  #timer = 0;
  #isPlain = false;
  #hasEnded = false;
  #tookMs = 0;
  text = "";

  constructor(element) {
    this.#element = element;
  }

  append(more) {
    this.text += more;
    this.#timer ||= setTimeout(() => this.#render(), Math.max(30, this.#tookMs / RENDERING_PART));
  }

  /** Show the whole text: now also with highlighted code, or as JSON if it is nothing else. */
  end() {
    this.#hasEnded = true;
    this.#render();
  }

  /** Show the text as it came, or as Markdown. */
  set isPlain(value) {
    this.#isPlain = value;
    this.#render();
  }

  #render() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    const began = performance.now();
    const element = this.#element;
    element.classList.toggle("markdown", !this.#isPlain);
    const json = this.#hasEnded && !this.#isPlain ? jsonOf(this.text) : undefined;
    if (this.#isPlain) element.textContent = this.text;
    else if (json) this.#showJson(json);
    else {
      element.replaceChildren(rendered(this.text));
      if (this.#hasEnded) for (const pre of element.querySelectorAll("pre")) codeBlock(pre);
    }
    this.#tookMs = performance.now() - began;
  }

  #showJson(value) {
    const pre = document.createElement("pre");
    pre.className = "bubble-json";
    pre.tabIndex = 0;
    showJson(pre, value);
    this.#element.replaceChildren(pre);
  }
}
