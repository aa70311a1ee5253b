// Keys of the list of requests: j and k move along its rows, 1 to 5 choose a tab, "/" the search field.
const list = document.getElementById("live");
const tabs = document.querySelectorAll(".tabs a");

function move(step) {
  const rows = [...list.querySelectorAll("tbody tr")].filter((row) => row.querySelector("a"));
  const current = rows.findIndex((row) => row.contains(document.activeElement));
  const next = current < 0 ? (step > 0 ? 0 : rows.length - 1) : current + step;
  rows[next]?.querySelector("a").focus();
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, select, [contenteditable], dialog")) return;
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "j" || event.key === "k") move(event.key === "j" ? 1 : -1);
  else if (event.key === "/") document.querySelector("input[name='q']").focus();
  else if (tabs[Number(event.key) - 1]) tabs[Number(event.key) - 1].click();
  else return;
  event.preventDefault();
});
