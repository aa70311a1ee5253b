// Presets: system prompts, tools and JSON schemas that the server stores.
import { $, asked, button, complain, headers, made, say } from "./dom.js";

const ADDRESS = "/admin/playground/presets";

/** The presets of one field: lets the user choose, save and delete them. */
class Presets {
  #all = [];

  constructor(container, field) {
    this.kind = container.dataset.kind;
    this.field = field;
    this.list = made("select", "", "", { "aria-label": `Saved ${container.dataset.label}` });
    this.remove = button("Delete", () => this.#delete());
    this.list.addEventListener("change", () => this.#use());
    container.append(this.list, button("Save…", () => this.#save()), this.remove);
    this.show([]);
  }

  show(all, chosen = "") {
    this.#all = all.filter((one) => one.kind === this.kind);
    const options = this.#all.map((one) => {
      const whose = one.owner ? ` (of ${one.owner})` : one.is_shared ? " (shared)" : "";
      return made("option", "", one.name + whose, { value: one.id });
    });
    this.list.replaceChildren(made("option", "", "Saved…", { value: "" }), ...options);
    this.list.value = chosen;
    this.remove.disabled = !this.#chosen()?.may_delete;
  }

  #chosen() {
    return this.#all.find((one) => String(one.id) === this.list.value);
  }

  async #use() {
    const preset = this.#chosen();
    this.remove.disabled = !preset?.may_delete;
    if (!preset) return;
    try {
      const { content } = await asked(`${ADDRESS}/${preset.id}`);
      this.field.value = content;
      this.field.dispatchEvent(new Event("input", { bubbles: true }));
    } catch (fault) {
      complain(fault.message);
    }
  }

  #save() {
    const dialog = $("save-preset");
    const form = dialog.querySelector("form");
    const error = form.querySelector("[role=alert]");
    const chosen = this.#chosen();
    const isOwn = chosen && !chosen.owner;
    form.elements.name.value = isOwn ? chosen.name : "";
    form.elements.is_shared.checked = isOwn && chosen.is_shared;
    error.textContent = "";
    form.onsubmit = async (event) => {
      event.preventDefault();
      const preset = {
        kind: this.kind,
        name: form.elements.name.value,
        content: this.field.value,
        is_shared: form.elements.is_shared.checked,
      };
      try {
        const body = JSON.stringify(preset);
        const saved = await asked(ADDRESS, { method: "POST", headers: headers(), body });
        await refresh([this], saved.id);
        dialog.close();
        say(`Saved ${saved.name}.`);
      } catch (fault) {
        error.textContent = fault.message;
      }
    };
    form.querySelector("[value=cancel]").onclick = () => dialog.close();
    dialog.showModal();
  }

  async #delete() {
    const preset = this.#chosen();
    if (!preset || !confirm(`Delete the preset ${preset.name}?`)) return;
    try {
      await asked(`${ADDRESS}/${preset.id}`, { method: "DELETE", headers: headers() });
      say(`Deleted ${preset.name}.`);
    } catch (fault) {
      complain(fault.message);
    }
    await refresh([this]);
  }
}

async function refresh(lists, chosen = "") {
  const { data } = await asked(ADDRESS);
  for (const list of lists) list.show(data, String(chosen));
}

export function showPresets(form) {
  const lists = [...form.querySelectorAll(".presets")].map(
    (container) => new Presets(container, form.elements[container.dataset.kind]),
  );
  refresh(lists).catch((fault) => complain(fault.message));
}
