// The page of one response: follow it while it runs, copy it as curl.
import "../admin_pages/copy_buttons.js";
import { AnswerView, events } from "./stream.js";

const PARTS = [".response-head", ".response-side"];
const OPEN = ["", "queued", "in_progress"];
const LOST = "The connection was lost. Reload the page to see how it goes on.";

/** Show what has changed besides the answer: the status, the actions, usage and times. */
async function refresh() {
  const answer = await fetch(location.href, { headers: { accept: "text/html" } });
  if (!answer.ok || answer.redirected) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of PARTS) document.querySelector(part).replaceWith(page.querySelector(part));
}

async function watch(container) {
  const view = new AnswerView(container);
  let shown = "";
  try {
    const answer = await fetch(container.dataset.events, { headers: { accept: "text/event-stream" } });
    if (!answer.ok) {
      view.fail((await answer.json()).error.message);
      return;
    }
    for await (const event of events(answer)) {
      const response = view.show(event);
      if (event.type === "error") return;
      if (!response || response.status === shown) continue;
      shown = response.status;
      if (!OPEN.includes(shown)) view.state.textContent = `Ended: ${shown}`;
      await refresh();
    }
  } catch {
    // What has failed is said below.
  }
  if (OPEN.includes(shown)) view.fail(LOST);
}

for (const container of document.querySelectorAll("[data-events]")) watch(container);
