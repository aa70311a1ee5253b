// The page of one response: follow it while it runs, copy it as curl.
import "../admin_pages/copy_buttons.js";
import { AnswerView, events } from "./stream.js";

const PARTS = [".response-head", ".response-side"];

/** Show what has changed besides the answer: the status, the actions, usage and times. */
async function refresh() {
  const answer = await fetch(location.href, { headers: { accept: "text/html" } });
  if (!answer.ok || answer.redirected) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of PARTS) document.querySelector(part).replaceWith(page.querySelector(part));
}

async function watch(container) {
  const view = new AnswerView(container);
  const answer = await fetch(container.dataset.events, { headers: { accept: "text/event-stream" } });
  if (!answer.ok) {
    view.fail((await answer.json()).error.message);
    return;
  }
  let shown = "";
  for await (const event of events(answer)) {
    const response = view.show(event);
    if (!response || response.status === shown) continue;
    shown = response.status;
    if (!["queued", "in_progress"].includes(shown)) view.state.textContent = `Ended: ${shown}`;
    await refresh();
  }
}

for (const container of document.querySelectorAll("[data-events]")) watch(container);
