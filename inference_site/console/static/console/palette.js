// The command palette: Ctrl+K or Cmd+K opens it on every page of the admin. The server searches.
addEventListener("DOMContentLoaded", () => {
  const palette = document.getElementById("palette");
  if (!palette) return;
  const input = palette.querySelector("input");
  const results = document.getElementById("palette-results");
  const state = document.getElementById("palette-state");
  let search = null; // The search that runs or was shown last: its promise and how to stop it.
  let timer = 0;

  const chosen = () => results.querySelector("[aria-selected=true]");
  const choose = (option) => {
    chosen()?.setAttribute("aria-selected", "false");
    option?.setAttribute("aria-selected", "true");
    option?.scrollIntoView({ block: "nearest" });
    if (option) input.setAttribute("aria-activedescendant", option.id);
    else input.removeAttribute("aria-activedescendant");
  };
  const show = async (signal) => {
    // Of a key only its first characters go to the server: addresses are logged in many places.
    const term = input.value.trim();
    const sent = term.startsWith("sk-") ? term.slice(0, 9) : term;
    const response = await fetch(`${palette.dataset.url}?${new URLSearchParams({ s: sent })}`, { signal });
    if (response.redirected) return location.reload(); // The session is over: to the login.
    const html = response.ok ? await response.text() : "";
    if (signal.aborted) return;
    results.innerHTML = html;
    const count = results.childElementCount;
    const found = count ? `${count} results` : "Nothing found.";
    state.textContent = response.ok ? found : "The search failed. Try again.";
    state.classList.toggle("sr", count > 0);
    choose(results.firstElementChild);
  };
  const start = () => {
    clearTimeout(timer);
    timer = 0;
    search?.controller.abort();
    const controller = new AbortController();
    const done = show(controller.signal).catch((error) => {
      if (error.name === "AbortError") return;
      results.replaceChildren(); // They belong to an earlier term.
      state.textContent = "The server cannot be reached.";
      state.classList.remove("sr");
    });
    search = { controller, done };
    return done;
  };
  const open = () => {
    if (palette.open) return;
    input.value = "";
    palette.showModal();
    start();
  };
  const follow = async (inNewTab) => {
    if (timer) start(); // Typed and sent at once: what is shown belongs to an earlier term.
    await search.done;
    const link = chosen()?.href;
    if (!link || !palette.open) return;
    if (inNewTab) window.open(link, "_blank", "noopener");
    else location.assign(link);
  };

  addEventListener("keydown", (event) => {
    if (event.key.toLowerCase() !== "k" || !(event.ctrlKey || event.metaKey) || event.altKey || event.shiftKey) return;
    event.preventDefault();
    if (palette.open) palette.close();
    else if (!document.querySelector("dialog[open]")) open();
  });
  for (const button of document.querySelectorAll("[data-palette]")) button.addEventListener("click", open);
  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(start, 120);
  });
  input.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    const steps = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (steps) {
      event.preventDefault();
      const options = [...results.children];
      choose(options[(options.indexOf(chosen()) + steps + options.length) % options.length]);
    } else if (event.key === "Enter") {
      event.preventDefault();
      follow(event.ctrlKey || event.metaKey);
    }
  });
  // A press beside the dialog's content is on the dialog itself.
  palette.addEventListener("mousedown", (event) => {
    if (event.target === palette) palette.close();
  });
});
