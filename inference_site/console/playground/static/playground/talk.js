// A conversation as a tree of turns. A turn has what was sent and one answer of each model; turns
// with the same parent are branches. ``leaf`` is the last turn of the branch that is shown.

let count = 0;

export function newId() {
  count += 1;
  return `${Date.now().toString(36)}-${count}-${Math.random().toString(36).slice(2, 8)}`;
}

export function newTalk(settings) {
  return { id: newId(), version: "", settings, draft: { text: "", images: [] }, turns: {}, leaf: null };
}

/**
 * An answer before its first event. Without an ``id`` the API has no response to continue. ``column`` is
 * that of its column, which keeps it when columns are added and removed.
 */
export function newAnswer(model, column = 0) {
  return { model, column, id: null, isKept: false, status: "", output: [], usage: null, run: null, error: null, ignored: "" };
}

export function addTurn(talk, parent, input, results = [], answers = []) {
  const turn = { id: newId(), parent, input, results, answers };
  talk.turns[turn.id] = turn;
  talk.leaf = turn.id;
  return turn;
}

/** Return the turns from the first one to this one. */
export function pathTo(talk, id) {
  const path = [];
  for (let turn = talk.turns[id]; turn; turn = talk.turns[turn.parent]) path.unshift(turn);
  return path;
}

export function branches(talk, turn) {
  return Object.values(talk.turns).filter((one) => one.parent === turn.parent);
}

/** Show the branch of this turn, down to its newest turn. */
export function choose(talk, turn) {
  const turns = Object.values(talk.turns);
  let last = turn;
  for (let next = turn; next; next = turns.findLast((one) => one.parent === last.id)) last = next;
  talk.leaf = last.id;
}

export function message(text, images = []) {
  const parts = images.map((url) => ({ type: "input_image", image_url: url }));
  const content = parts.length ? [...(text.trim() ? [{ type: "input_text", text }] : []), ...parts] : text;
  return { type: "message", role: "user", content };
}

export function textOf(content) {
  if (typeof content === "string") return content;
  return (content ?? []).map((part) => part.text ?? part.refusal ?? "").join("");
}

/** Return the place of a column among the answers of a turn; the first, if it has none there. */
function placeOf(column, turn) {
  const answers = turn?.answers ?? [];
  return Math.max(0, answers.findIndex((answer, place) => (answer.column ?? place) === column));
}

/**
 * Return the input of a turn for the model of a column, and the id of the previous response. Answers
 * that the API does not store for this user are sent as items. A model that has no earlier answer
 * continues the answers of the first model.
 */
export function given(talk, turn, column) {
  // What a turn sent to the model: results of the calls in the answer before it, then the message.
  const sent = (one) => [...(one.results[placeOf(column, talk.turns[one.parent])] ?? []), ...one.input];
  const items = [];
  let previous = null;
  for (const one of pathTo(talk, turn.parent).reverse()) {
    const answer = one.answers[placeOf(column, one)];
    if (answer?.id && answer.isKept) {
      previous = answer.id;
      break;
    }
    if (answer?.output.length) items.unshift(...sent(one), ...answer.output.map(withoutId));
  }
  items.push(...sent(turn));
  const [only] = items;
  const isText = items.length === 1 && only.role === "user" && typeof only.content === "string";
  return { input: isText ? only.content : items, previous };
}

function withoutId({ id, status, ...item }) {
  return item;
}

function isMade(item) {
  return item.role === "assistant" || ["reasoning", "function_call", "custom_tool_call"].includes(item.type);
}

/** Add the items of a stored conversation: each output of the model answers the input before it. */
export function addItems(talk, items, model) {
  let turn = null;
  for (const item of items) {
    const answered = turn?.answers[0];
    if (!turn || (answered && !isMade(item))) turn = addTurn(talk, talk.leaf, []);
    if (!isMade(item)) turn.input.push(item);
    else if (answered) answered.output.push(item);
    else turn.answers.push({ ...newAnswer(model), status: "stored", output: [item] });
  }
}

export function titleOf(talk) {
  for (const turn of Object.values(talk.turns)) {
    const said = turn.input.find((item) => item.role === "user");
    const content = said?.content ?? [];
    // The placeholder of an image comes after the text.
    const first = typeof content === "string" ? content : content.find((part) => part.text)?.text;
    const text = first?.replace(/\s+/g, " ").trim();
    if (text) return text.slice(0, 60);
  }
  return "New conversation";
}
