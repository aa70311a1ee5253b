// Shows the memory that the model in the form needs, and again after changes, before it is saved.
const shown = document.getElementById("estimate");
const form = document.getElementById("storedmodel_form");
let wait, asked = 0;

async function estimate() {
  const number = (asked += 1);
  const answer = await fetch(shown.dataset.url, { method: "POST", body: new FormData(form) });
  const text = await answer.text();
  // An answer to earlier values may come later than that to the present ones.
  if (number === asked) shown.textContent = answer.ok && !answer.redirected ? text : "There is no estimate now.";
}

function begin() {
  const { file, engine } = form.elements;
  if (file.value || engine.value === "openai_upstream") estimate().catch(() => {});
}

form?.addEventListener("input", () => {
  clearTimeout(wait);
  wait = setTimeout(begin, 300);
});
if (form) begin();
