// Server-sent events over fetch, and a response's events as bubbles.

/** Yield the JSON of each event of an SSE answer, until it ends. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      const line = frame.split("\n").find((one) => one.startsWith("data: "));
      if (line && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function element(name, classes, text = "") {
  const made = document.createElement(name);
  made.className = classes;
  made.textContent = text;
  return made;
}

const CALLS = {
  code_interpreter_call: () => "Code",
  file_search_call: () => "File search",
  mcp_approval_request: (item) => `Approval needed: ${item.name} of ${item.server_label}`,
  mcp_call: (item) => `Call of ${item.name} of ${item.server_label}`,
  mcp_list_tools: (item) => `Tools of ${item.server_label}`,
  web_search_call: () => "Web search",
};
/** Fields of a call that its card shows when it has ended. */
const SHOWN = ["action", "queries", "tools", "output", "results", "error", "code", "operation"];

/** Return the heading of the card of a call; "" for an item that is no call. */
function callOf(item) {
  const known = CALLS[item.type];
  if (known) return known(item);
  return item.type.endsWith("_call") ? `Call of ${item.name ?? item.type.replace("_call", "")}` : "";
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** The text of an element as it came. */
class PlainText {
  #element;
  text = "";

  constructor(element) {
    this.#element = element;
  }

  append(more) {
    this.text += more;
    this.#element.append(more);
  }

  end() {}
}

/**
 * Shows the output of one response while it comes. ``Text`` is the class that shows the text of
 * messages; ``showJson`` fills the card of a call.
 */
export class AnswerView {
  #container;
  #texts = new Map();
  #startedAt = null;
  #deltas = 0;
  #Text;
  #showJson;

  constructor(container, { Text = PlainText, showJson = null } = {}) {
    this.#container = container;
    this.#Text = Text;
    this.#showJson = showJson ?? ((card, value) => { card.textContent = JSON.stringify(value, null, 2); });
    this.state = element("p", "answer-state", "Waiting …");
    container.append(this.state);
  }

  /** The texts of the messages so far. */
  get messages() {
    return [...this.#texts.values()].filter((text) => text.isMessage);
  }

  /** Take one event; return the response's object with those that have it. */
  show(event) {
    const short = event.type.replace("response.", "");
    if (short === "output_item.added") this.#begin(event.output_index, event.item);
    else if (short.endsWith(".delta")) this.#grow(event);
    else if (short === "output_item.done") this.#end(event.output_index, event.item);
    else if (short === "in_progress") this.#start();
    else if (short === "queued") this.state.textContent = "Waiting in the queue …";
    else if (event.type === "error") this.fail(event.message);
    return event.response;
  }

  fail(message) {
    const bubble = element("div", "bubble bubble-error");
    bubble.setAttribute("role", "alert");
    bubble.append(element("p", "bubble-role", "Error"), element("div", "bubble-text", message));
    this.#container.insertBefore(bubble, this.state.isConnected ? this.state : null);
  }

  /** Output tokens a second by what has come, or by what the response says that it used. */
  speed(tokens = this.#deltas) {
    const seconds = (performance.now() - this.#startedAt) / 1000;
    return this.#startedAt === null || seconds <= 0 ? 0 : tokens / seconds;
  }

  /** What came before is of an attempt that another worker began anew. */
  #start() {
    this.#container.replaceChildren(this.state);
    this.#texts.clear();
    this.#startedAt = null;
    this.#deltas = 0;
    this.state.textContent = "Running …";
  }

  #begin(index, item) {
    this.#texts.set(index, this.#bubble(item));
  }

  #bubble(item) {
    if (item.type === "reasoning") {
      const folded = element("details", "bubble bubble-reasoning");
      const text = element("div", "bubble-text");
      folded.append(element("summary", "", "Reasoning"), text);
      this.#container.insertBefore(folded, this.state);
      return new PlainText(text);
    }
    const call = callOf(item);
    const bubble = element("div", call ? "bubble bubble-call" : "bubble bubble-assistant");
    const text = element(call ? "pre" : "div", call ? "bubble-json" : "bubble-text");
    if (call) text.tabIndex = 0;
    bubble.append(element("p", "bubble-role", call || "assistant"), text);
    this.#container.insertBefore(bubble, this.state);
    if (call) return Object.assign(new PlainText(text), { card: text });
    return Object.assign(new this.#Text(text), { isMessage: true });
  }

  #grow(event) {
    this.#startedAt ??= performance.now();
    this.#deltas += 1;
    this.#texts.get(event.output_index)?.append(event.delta);
  }

  #end(index, item) {
    const text = this.#texts.get(index);
    text?.end();
    if (!text?.card) return;
    const given = text.text || item.arguments;
    const card = given ? { arguments: parsed(given) } : {};
    for (const name of SHOWN) {
      const value = item[name];
      if (value != null) card[name] = typeof value === "string" ? parsed(value) : value;
    }
    const names = Object.keys(card);
    const shown = names.length === 1 ? card[names[0]] : card;
    if (!names.length) text.card.remove();
    else if (typeof shown === "string") text.card.textContent = shown;
    else this.#showJson(text.card, shown);
  }
}
