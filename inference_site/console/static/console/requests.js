// The list of requests: links with data-panel open in the panel beside it, and keys move along its rows.
// j and k choose the next row and the one before, 1 to 6 a tab, "/" the search field, Esc closes the panel.
const list = document.getElementById("live");
const panel = document.getElementById("panel");
const tabs = document.querySelectorAll(".tabs a");
let opened = ""; // The address of the row whose panel is open.

function rowLinks() {
  return [...list.querySelectorAll("tbody th a[data-panel]")];
}

async function open(address) {
  const url = new URL(address, location.href);
  url.searchParams.set("fragment", "1");
  const answer = await fetch(url, { headers: { accept: "text/html" } });
  if (!answer.ok || answer.redirected) {
    location.href = address;
    return;
  }
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  panel.replaceChildren(...page.body.childNodes);
  panel.hidden = false;
  panel.scrollTop = 0;
  panel.focus();
  opened = new URL(address, location.href).href;
}

function close() {
  panel.hidden = true;
  panel.replaceChildren();
  rowLinks().find((link) => link.href === opened)?.focus();
}

function move(step) {
  const links = rowLinks();
  const isOpen = !panel.hidden;
  const row = document.activeElement.closest("tbody tr");
  const current = links.findIndex((link) => (isOpen ? link.href === opened : row?.contains(link)));
  const next = links[current < 0 ? (step > 0 ? 0 : links.length - 1) : current + step];
  if (!next) return;
  if (isOpen) open(next.href).catch(() => {});
  else next.focus();
}

document.addEventListener("click", (event) => {
  if (event.target.closest("[data-close]")) close();
  const link = event.target.closest("a[data-panel]");
  if (!link || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  open(link.href).catch(() => (location.href = link.href));
});

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("input, textarea, select, [contenteditable], dialog")) return;
  if (document.querySelector("dialog[open], :popover-open")) return;
  if (event.key === "j" || event.key === "k") move(event.key === "j" ? 1 : -1);
  else if (event.key === "Escape" && !panel.hidden) close();
  else if (event.key === "/") document.querySelector("input[name='q']").focus();
  else if (tabs[Number(event.key) - 1]) tabs[Number(event.key) - 1].click();
  else return;
  event.preventDefault();
});
