// Saves the conversation that is shown, and lists the conversations that this browser stores.
import { $, made, say } from "./dom.js";
import * as store from "./store.js";
import { newTalk } from "./talk.js";

// In the session storage of this tab: the conversation to show after a reload, and unsaved changes.
const SHOWN = "playground:shown";
const LEFT = "playground:left";
const DELAY_MS = 300;

export class Keeper {
  #user;
  #current;
  #saving = Promise.resolve();
  #later = 0;
  #unsaved = 0;

  /** ``current`` returns the conversation with the message that is being written. */
  constructor(user, current) {
    this.#user = user;
    this.#current = current;
    addEventListener("pagehide", () => { if (this.#later || this.#unsaved) this.#leave(); });
  }

  /** Write the changes to the session storage: a page that closes does not wait for IndexedDB. */
  #leave() {
    const { id, settings, draft } = this.#current();
    const left = { user: this.#user, id, settings, text: draft.text };
    sessionStorage.setItem(LEFT, JSON.stringify(left));
  }

  /** Save the conversation soon, not at every key stroke. */
  keepLater() {
    clearTimeout(this.#later);
    this.#later = setTimeout(() => this.keep(), DELAY_MS);
  }

  /** Save a conversation, one save after the other. */
  keep(talk = this.#current()) {
    clearTimeout(this.#later);
    this.#later = 0;
    this.#unsaved += 1; // A save that is running ends when the page closes.
    this.#saving = this.#saving
      .then(() => store.save(this.#user, talk))
      .then(() => { if (talk === this.#current()) sessionStorage.setItem(SHOWN, talk.id); })
      .catch(() => say("This browser does not keep the conversation."))
      .finally(() => { this.#unsaved -= 1; });
    return this.#saving;
  }

  /** Return the conversation that this tab showed last, or the newest; undefined if there is none. */
  async last() {
    const known = await store.titles(this.#user);
    const left = JSON.parse(sessionStorage.getItem(LEFT) ?? "null");
    sessionStorage.removeItem(LEFT);
    const shown = known.find((one) => one.id === sessionStorage.getItem(SHOWN)) ?? known[0];
    const found = shown && (await store.load(this.#user, shown.id));
    if (left?.user !== this.#user || (found && found.id !== left.id)) return found;
    const { settings, text } = left;
    const talk = found ?? newTalk(settings);
    return { ...talk, settings, draft: { ...talk.draft, text } };
  }

  async load(id) {
    await this.#saving;
    return store.load(this.#user, id);
  }

  async forget(id) {
    clearTimeout(this.#later);
    await this.#saving;
    await store.remove(this.#user, id).catch(() => {}); // An error means that it was not stored either.
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
