// Conversations of one user in the browser's IndexedDB. Above a limit, the oldest conversations are
// deleted. A conversation that is too large loses the images of its oldest turns, then these turns.
import { newId, titleOf } from "./talk.js";

const MOST_TALKS = 30;
const MOST_CHARS = 24_000_000;
const MOST_OF_ONE = 16_000_000;

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

/** Run a function on both stores in one transaction. It may await only requests of the stores. */
async function within(mode, act) {
  const opening = indexedDB.open("playground", 1);
  opening.onupgradeneeded = () => {
    opening.result.createObjectStore("talks");
    opening.result.createObjectStore("titles");
  };
  const database = await done(opening);
  try {
    const transaction = database.transaction(["talks", "titles"], mode);
    const ended = new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = () => reject(transaction.error);
    });
    const found = await act(transaction.objectStore("talks"), transaction.objectStore("titles"));
    await ended;
    return found;
  } finally {
    database.close();
  }
}

/** Return the titles of this user's conversations, newest first; delete those of other users. */
export async function titles(user) {
  return within("readwrite", async (talks, known) => {
    for (const key of await done(known.getAllKeys())) {
      if (key[0] !== user) for (const store of [talks, known]) store.delete(key);
    }
    const own = await done(known.getAll());
    return own.filter((one) => one.user === user).sort((a, b) => b.savedAt - a.savedAt);
  });
}

export async function load(user, id) {
  return within("readonly", (talks) => done(talks.get([user, id])));
}

export async function remove(user, id) {
  return within("readwrite", async (talks, known) => {
    for (const store of [talks, known]) store.delete([user, id]);
  });
}

/** Save a conversation; save it as a new one if another tab has changed it since it was read. */
export async function save(user, talk) {
  const kept = structuredClone(talk);
  const chars = fit(kept);
  return within("readwrite", async (talks, known) => {
    const saved = await done(known.get([user, talk.id]));
    if (saved && saved.version !== talk.version) talk.id = newId();
    talk.version = newId();
    const { id, version } = talk;
    talks.put({ ...kept, id, version }, [user, id]);
    known.put({ user, id, version, chars, title: titleOf(talk), savedAt: Date.now() }, [user, id]);
    const all = (await done(known.getAll())).sort((a, b) => b.savedAt - a.savedAt);
    let sum = 0;
    all.forEach((one, place) => {
      sum += one.chars;
      if (one.id === id || (place < MOST_TALKS && sum <= MOST_CHARS)) return;
      for (const store of [talks, known]) store.delete([one.user, one.id]);
    });
  });
}

/** Shorten a conversation to the limit; return its length in characters. */
function fit(talk) {
  const sizes = new Map(Object.values(talk.turns).map((turn) => [turn, JSON.stringify(turn).length]));
  let sum = JSON.stringify(talk.draft).length + [...sizes.values()].reduce((a, b) => a + b, 0);
  const before = [...sizes.keys()].filter((turn) => turn.id !== talk.leaf);
  for (const turn of before) {
    if (sum <= MOST_OF_ONE) return sum;
    dropImages(turn);
    const size = JSON.stringify(turn).length;
    sum -= sizes.get(turn) - size;
    sizes.set(turn, size);
  }
  for (const turn of before) {
    if (sum <= MOST_OF_ONE) return sum;
    delete talk.turns[turn.id];
    sum -= sizes.get(turn);
  }
  return sum;
}

function dropImages(turn) {
  for (const item of turn.input) {
    if (!Array.isArray(item.content)) continue;
    item.content = item.content.map((part) =>
      part.type === "input_image" ? { type: "input_text", text: "[An image that was not kept]" } : part);
  }
}
