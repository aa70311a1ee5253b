// Sets light or dark before the first paint: the user's choice, else the system's preference.
(() => {
  const key = "adminTheme"; // Where the admin's theme keeps the choice, as JSON.
  const system = matchMedia("(prefers-color-scheme: dark)");

  function chosen() {
    try {
      return JSON.parse(localStorage.getItem(key));
    } catch {
      return null;
    }
  }

  function apply() {
    const choice = chosen();
    const dark = choice === "dark" || (choice !== "light" && system.matches);
    document.documentElement.classList.toggle("dark", dark);
    return dark;
  }

  apply();
  system.addEventListener("change", apply);
  addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme")?.addEventListener("click", () => {
      localStorage.setItem(key, JSON.stringify(apply() ? "light" : "dark"));
      apply();
    });
  });
})();
