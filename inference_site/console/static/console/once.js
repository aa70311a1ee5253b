// Sends each form once: a second click while the server has not answered would make, or pay for, a thing
// twice. After some seconds a form can be sent again: the answer may have been stopped.
const AGAIN_MS = 5_000;
const sent = new WeakMap(); // When each form was sent.

addEventListener("submit", (event) => {
  const form = event.target;
  if (event.defaultPrevented || form.getAttribute("method")?.toLowerCase() !== "post") return;
  if (performance.now() - (sent.get(form) ?? -AGAIN_MS) < AGAIN_MS) event.preventDefault();
  else sent.set(form, performance.now());
});
// A page that is the answer to a form and shows a secret: a reload would make another secret.
addEventListener("DOMContentLoaded", () => {
  const back = document.querySelector("a[data-back]");
  if (back) history.replaceState(null, "", back.href);
});
