// Times come in UTC. A button shows them in the browser's zone instead; the other one is the tooltip.
const KEY = "console:times";
const ZONE = new Intl.DateTimeFormat("en", { timeZoneName: "short" });
const LOCAL = new Intl.DateTimeFormat("sv", { dateStyle: "short", timeStyle: "medium" }); // ISO's form.

function isLocal() {
  return localStorage.getItem(KEY) === "local";
}

function zoneOf(moment) {
  return ZONE.formatToParts(moment).find((part) => part.type === "timeZoneName").value;
}

function show(time) {
  const moment = new Date(time.dateTime);
  if (Number.isNaN(moment.valueOf())) return;
  time.dataset.utc ??= time.textContent;
  const hasZone = "zone" in time.dataset;
  const local = LOCAL.format(moment);
  const named = `${local} ${zoneOf(moment)}`;
  const utc = hasZone ? time.dataset.utc : `${time.dataset.utc} UTC`;
  time.textContent = isLocal() ? (hasZone ? named : local) : time.dataset.utc;
  time.title = isLocal() ? utc : named;
}

/** Make the times that the theme writes as text elements, too. */
function mark(root) {
  for (const place of root.querySelectorAll("#result_list td, #result_list th, .readonly")) {
    const text = place.textContent.trim();
    if (!/^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC$/.test(text)) continue;
    const walker = document.createTreeWalker(place, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      if (walker.currentNode.data.trim() !== text) continue;
      const time = document.createElement("time");
      time.dateTime = text.replace(" ", "T").replace(" UTC", "Z");
      time.dataset.zone = "";
      time.textContent = text;
      walker.currentNode.replaceWith(time);
      break;
    }
  }
}

function showAll(root) {
  mark(root);
  for (const time of root.querySelectorAll("time[datetime]")) show(time);
}

addEventListener("DOMContentLoaded", () => {
  const button = document.getElementById("times");
  const label = () => {
    if (!button) return;
    button.textContent = isLocal() ? zoneOf(new Date()) : "UTC";
    button.setAttribute("aria-pressed", String(isLocal()));
  };
  button?.addEventListener("click", () => {
    localStorage.setItem(KEY, isLocal() ? "utc" : "local");
    label();
    showAll(document);
  });
  label();
  showAll(document);
  // Parts of live pages are replaced.
  new MutationObserver((changes) => {
    for (const { addedNodes } of changes) {
      for (const node of addedNodes) {
        if (node.nodeType === Node.ELEMENT_NODE && node.localName !== "time") showAll(node);
      }
    }
  }).observe(document.body, { childList: true, subtree: true });
});
