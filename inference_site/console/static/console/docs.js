// Adds to Swagger UI what keyboards and screen readers need and it lacks: the language of the page,
// headings in an unbroken order, names of landmarks and controls, and examples that can be scrolled.
// The page is as light or dark as the console is in this browser.
document.documentElement.lang = "en";
const darkSystem = matchMedia("(prefers-color-scheme: dark)");

function applyScheme() {
  // Where the console's menu keeps what was chosen there: "light", "dark" or "auto", as JSON.
  const chosen = localStorage.getItem("adminTheme");
  const isDark = chosen === '"dark"' || (chosen !== '"light"' && darkSystem.matches);
  document.documentElement.classList.toggle("dark-mode", isDark);
}

applyScheme();
darkSystem.addEventListener("change", applyScheme);
addEventListener("storage", applyScheme);
const LEVELS = { H2: "1", H3: "2", H4: "3", H5: "4" };
const REGIONS = { ".information-container": "About this API", ".scheme-container": "Key" };

function set(element, attribute, value) {
  // Only a change, because each one calls the observer again.
  if (element.getAttribute(attribute) !== value) element.setAttribute(attribute, value);
}

function mend() {
  for (const heading of document.querySelectorAll("h2, h3, h4, h5")) {
    set(heading, "aria-level", LEVELS[heading.tagName]);
  }
  for (const [selector, label] of Object.entries(REGIONS)) {
    for (const region of document.querySelectorAll(selector)) {
      set(region, "role", "region");
      set(region, "aria-label", label);
    }
  }
  for (const table of document.querySelectorAll("table.responses-table[role=region]")) {
    const summary = table.closest(".opblock").querySelector(".opblock-summary-path");
    set(table, "aria-label", `Responses of ${summary.dataset.path}: ${table.id}`);
  }
  for (const control of document.querySelectorAll(".parameters :is(select, input, textarea)")) {
    const name = control.closest("tr")?.querySelector(".parameter__name")?.firstChild;
    if (name) set(control, "aria-label", name.textContent);
  }
  for (const example of document.querySelectorAll("pre")) set(example, "tabindex", "0");
  for (const close of document.querySelectorAll("button.close-modal")) {
    set(close, "aria-label", "Close");
  }
}

let isDue = false;
addEventListener("DOMContentLoaded", () => {
  new MutationObserver(() => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      mend();
    });
  }).observe(document.body, { childList: true, subtree: true });
});
