// Reloads the live part of a page every 3 s while the page is visible and has no focused element.
const EVERY_MS = 3000;

async function refresh() {
  const live = document.getElementById("live");
  if (document.hidden || live.contains(document.activeElement)) return;
  const answer = await fetch(location.href, { headers: { accept: "text/html" } });
  if (!answer.ok || answer.redirected) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = page.getElementById("live");
  if (fresh && !live.contains(document.activeElement)) live.replaceChildren(...fresh.childNodes);
}

setInterval(() => refresh().catch(() => {}), EVERY_MS);
