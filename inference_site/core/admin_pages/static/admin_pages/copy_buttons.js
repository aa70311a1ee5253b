// A button with data-copy copies the text of the element with that id.
import { copy } from "./copy.js";

document.addEventListener("click", async ({ target }) => {
  const button = target.closest("[data-copy]");
  if (!button) return;
  await copy(document.getElementById(button.dataset.copy).textContent);
  button.textContent = "Copied";
});
