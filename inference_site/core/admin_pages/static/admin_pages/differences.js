// The differences between two answers, by words.
import "./vendor/diff.js"; // It defines the global Diff.

const PATIENCE_MS = 1_000;

function made(name, classes, text = "") {
  const element = document.createElement(name);
  element.className = classes;
  element.textContent = text;
  return element;
}

/** Return a bubble with the second text: what only the first one has is struck out. */
export function differences(first, second, title = "Differences from the first answer") {
  const bubble = made("div", "bubble bubble-diff");
  bubble.append(made("p", "bubble-role", title));
  const parts = globalThis.Diff.diffWordsWithSpace(first, second, { timeout: PATIENCE_MS });
  if (!parts) {
    bubble.append(made("p", "bubble-note", "The answers are too different to compare."));
    return bubble;
  }
  const text = made("div", "bubble-text");
  for (const { added, removed, value } of parts) {
    const name = added ? "ins" : removed ? "del" : "span";
    text.append(made(name, "", value));
  }
  bubble.append(text);
  return bubble;
}
