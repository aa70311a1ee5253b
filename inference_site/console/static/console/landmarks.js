// Adds what keyboards and screen readers need and the theme lacks: a main landmark, a link that skips
// the menu, and menu buttons that can be focused and have a name.
addEventListener("DOMContentLoaded", () => {
  const content = document.getElementById("content");
  if (content && document.getElementById("nav-sidebar")) {
    content.tabIndex = -1; // So that the focus moves there with the link.
    document.body.insertAdjacentHTML("afterbegin", '<a class="skip-link" href="#content">Skip to the content</a>');
  }
  const main = document.getElementById("main") ?? document.getElementById("page");
  (main ?? document.querySelector("body > div"))?.setAttribute("role", "main");
  for (const header of document.querySelectorAll("thead th")) {
    if (!header.textContent.trim() && !header.querySelector("input")) {
      header.insertAdjacentHTML("beforeend", '<span class="sr">Actions</span>');
    }
  }
  // Name each field that can be edited in a list by its column and its row.
  for (const input of document.querySelectorAll("#result_list tbody td input[type=checkbox]:not([aria-label])")) {
    const cell = input.closest("td");
    const column = cell.closest("table").tHead.rows[0].cells[cell.cellIndex];
    const row = [...cell.parentElement.cells].find((one) => one.textContent.trim());
    input.setAttribute("aria-label", `${column.textContent.trim()}: ${row.textContent.trim()}`);
  }
  const icons = document.querySelectorAll(
    "span[x-on\\:click*='sidebarMobileOpen'], span[x-on\\:click*='sidebarDesktopOpen']",
  );
  for (const icon of icons) {
    icon.setAttribute("role", "button");
    icon.setAttribute("aria-label", "Menu");
    icon.tabIndex = 0;
    icon.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      icon.click();
    });
  }
});
addEventListener("load", () => {
  // The theme gives all of them the same name.
  const regions = document.querySelectorAll(".simplebar-content-wrapper[role=region]");
  regions.forEach((region, index) => region.setAttribute("aria-label", `Scrollable part ${index + 1}`));
  // Django's double list boxes add these icons after the load event.
  setTimeout(() => {
    for (const icon of document.querySelectorAll(".selector .help-tooltip[aria-label]")) {
      icon.setAttribute("role", "img");
    }
  });
});
