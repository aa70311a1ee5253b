// Shows how often the rule in the form would have fired in the last week, and again after changes.
const shown = document.getElementById("rule-preview");
const form = document.getElementById("rule_form");
const NAMES = ["kind", "bound", "factor", "model", "project", "api_key"];
let wait, asked = 0;

async function preview() {
  const number = (asked += 1);
  const values = new FormData(form);
  const query = new URLSearchParams(NAMES.map((name) => [name, values.get(name) ?? ""]));
  const answer = await fetch(`${shown.dataset.url}?${query}`);
  const text = await answer.text();
  // An answer to earlier values may come later than that to the present ones.
  if (number === asked) shown.textContent = answer.ok && !answer.redirected ? text : "There is no preview now.";
}

form?.addEventListener("input", () => {
  clearTimeout(wait);
  wait = setTimeout(() => preview().catch(() => {}), 300);
});
if (form?.elements.namedItem("kind")?.value) preview().catch(() => {});
