// The page of one response: follow it while it runs, copy it as curl.
import { AnswerView, copy, events } from "./stream.js";

async function watch(container) {
  const view = new AnswerView(container);
  const answer = await fetch(container.dataset.events, { headers: { accept: "text/event-stream" } });
  if (!answer.ok) {
    view.fail((await answer.json()).error.message);
    return;
  }
  for await (const event of events(answer)) {
    const response = view.show(event);
    if (!response || ["queued", "in_progress"].includes(response.status)) continue;
    view.state.textContent = `Ended: ${response.status}`;
    document.querySelector(".response-actions form")?.remove();
  }
}

for (const container of document.querySelectorAll("[data-events]")) watch(container);

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    await copy(document.getElementById(button.dataset.copy).textContent);
    button.textContent = "Copied";
  });
}
