// Elements and messages of the page. Texts are set as text: no output of a model becomes HTML.
import { copy } from "../admin_pages/copy.js";

export const $ = (id) => document.getElementById(id);

export function made(name, classes = "", text = "", attributes = {}) {
  const element = document.createElement(name);
  element.className = classes;
  element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

export function button(label, act, { classes = "button-plain", ...attributes } = {}) {
  const element = made("button", classes, label, { type: "button", ...attributes });
  element.addEventListener("click", () => act(element));
  return element;
}

export function complain(text) {
  $("complaint").textContent = text;
}

/** Show a message; a screen reader reads it, too. */
export function say(text) {
  $("note").textContent = text;
}

/** Copy a text, and show on the button that it was copied. */
export async function copyFrom(element, text) {
  const label = (element.dataset.label ??= element.textContent);
  try {
    await copy(text);
    element.textContent = "Copied";
  } catch {
    element.textContent = "Not copied";
  }
  say(`${element.textContent}.`);
  clearTimeout(element.reset);
  element.reset = setTimeout(() => { element.textContent = label; }, 2000);
}

/** Headers of a request with a body, with the CSRF token. */
export function headers() {
  const token = document.querySelector("#settings [name=csrfmiddlewaretoken]").value;
  return { "content-type": "application/json", "x-csrftoken": token };
}

/** Return the error object of an API answer. */
export async function faultOf(answer) {
  const requestId = answer.headers.get("x-request-id");
  try {
    const { message, code, param, type } = (await answer.json()).error;
    return { message, code: code ?? type, param, requestId };
  } catch {
    return { message: `The server answered ${answer.status}.`, requestId };
  }
}

/** Return the JSON of an answer; throw an Error with the API's message. */
export async function asked(address, options = {}) {
  const answer = await fetch(address, options);
  if (answer.ok) return answer.json();
  throw new Error((await faultOf(answer)).message);
}
