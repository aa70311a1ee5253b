// Reloads the live part of a page every 3 s, or every data-every-s seconds, and shows how old it is.
// Reloading pauses while the page is hidden, after a click on Pause, and while the pointer or the focus
// is in that part, so that rows do not move under them, or rows are chosen; a part with data-steady has
// no rows that move.
// Elements with data-live are reloaded with it.
const live = document.getElementById("live");
const EVERY_MS = 1000 * (live.dataset.everyS ?? 3);
const POINTS = "steady" in live.dataset ? "focus is" : "pointer or the focus is";
const PATIENCE_MS = 30_000;
let refreshedAt = Date.now();
let isAsking = false;
let isLoggedOut = false;

const note = document.getElementById("refreshed");

const pause = document.getElementById("pause");
pause?.addEventListener("click", () => {
  const isPaused = pause.getAttribute("aria-pressed") !== "true";
  pause.setAttribute("aria-pressed", String(isPaused));
  pause.textContent = isPaused ? "Resume" : "Pause";
  if (!isPaused) refresh().catch(() => {});
});

function isPaused() {
  return pause?.getAttribute("aria-pressed") === "true";
}

function isInUse() {
  if (live.querySelector("[name='chosen']:checked")) return true; // The choice would be lost.
  return live.contains(document.activeElement) || (!("steady" in live.dataset) && live.matches(":hover"));
}

async function refresh() {
  // One request at a time: a slow server would get one more every three seconds.
  if (isAsking || document.hidden || isPaused() || isInUse()) return;
  isAsking = true;
  try {
    await show();
  } finally {
    isAsking = false;
  }
}

async function show() {
  const options = { headers: { accept: "text/html" }, signal: AbortSignal.timeout(PATIENCE_MS) };
  const answer = await fetch(location.href, options);
  isLoggedOut = answer.redirected;
  if (!answer.ok || isLoggedOut) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = page.getElementById("live");
  if (!fresh || isInUse()) return;
  const opened = fresh.querySelectorAll("details");
  live.querySelectorAll("details").forEach((old, index) => opened[index]?.toggleAttribute("open", old.open));
  live.replaceChildren(...fresh.childNodes);
  const focused = document.activeElement;
  for (const part of document.querySelectorAll("[data-live]")) {
    if (part !== focused && part.contains(focused)) continue; // The focus would be lost.
    part.replaceChildren(...page.getElementById(part.id).childNodes);
  }
  refreshedAt = Date.now();
}

function say() {
  const age = `Updated ${Math.round((Date.now() - refreshedAt) / 1000)} s ago.`;
  if (isLoggedOut) note.textContent = `${age} The session is over: reload the page to log in.`;
  else if (isPaused()) note.textContent = `${age} Paused.`;
  else note.textContent = isInUse() ? `${age} Paused while the ${POINTS} below.` : age;
}

setInterval(() => refresh().catch(() => {}), EVERY_MS);
setInterval(say, 1000);
