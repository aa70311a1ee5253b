// Keeps the conversation that is shown, and lists those that this browser has.
import { $, made, say } from "./dom.js";
import * as store from "./store.js";

const SHOWN = "playground:shown"; // Of this tab: a reload shows the same conversation.
const DELAY_MS = 300;

export class Keeper {
  #user;
  #current;
  #saving = Promise.resolve();
  #later = 0;

  /** ``current`` returns the conversation with what is being written. */
  constructor(user, current) {
    this.#user = user;
    this.#current = current;
    addEventListener("pagehide", () => { if (this.#later) this.keep(); });
  }

  /** Save it soon: it changes with every key. */
  keepLater() {
    clearTimeout(this.#later);
    this.#later = setTimeout(() => this.keep(), DELAY_MS);
  }

  /** Save it, one save after the other. */
  keep() {
    clearTimeout(this.#later);
    this.#later = 0;
    const talk = this.#current();
    this.#saving = this.#saving
      .then(() => store.save(this.#user, talk))
      .then(() => { if (talk === this.#current()) sessionStorage.setItem(SHOWN, talk.id); })
      .catch(() => say("This browser does not keep the conversation."));
    return this.#saving;
  }

  /** Return the conversation that this tab has shown, else the newest; undefined if there is none. */
  async last() {
    const known = await store.titles(this.#user);
    const id = sessionStorage.getItem(SHOWN) ?? known[0]?.id;
    return id && store.load(this.#user, id);
  }

  load(id) {
    return store.load(this.#user, id);
  }

  async forget(id) {
    clearTimeout(this.#later);
    await this.#saving;
    await store.remove(this.#user, id);
    sessionStorage.removeItem(SHOWN);
  }

  /** List the conversations, newest first. */
  async list() {
    const known = await store.titles(this.#user).catch(() => []);
    const { id } = this.#current();
    const isNew = !known.some((one) => one.id === id);
    const all = isNew ? [{ id, title: "New conversation" }, ...known] : known;
    $("talks").replaceChildren(...all.map((one) => made("option", "", one.title, { value: one.id })));
    $("talks").value = id;
  }
}
