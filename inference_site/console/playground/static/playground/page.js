// The page of the playground: sends the form to the models, and shows and stores the conversation.
import { asCurl, asPython } from "./code.js";
import { Columns } from "./columns.js";
import { Composer, isEmpty } from "./composer.js";
import { $, asked, complain, copyFrom, say } from "./dom.js";
import { bodyOf, valuesFrom, valuesOf } from "./form.js";
import { Keeper } from "./keeper.js";
import { showPresets } from "./presets.js";
import { Run, isOpen, recover } from "./run.js";
import { addItems, addTurn, choose, given, newAnswer, newTalk, pathTo } from "./talk.js";
import { drawTurn, showEnd } from "./turns.js";

const { user, origin, mostImageBytes } = $("playground").dataset;
const form = $("settings");
const seeing = new Set([...form.elements.model.options].filter((one) => "sees" in one.dataset).map((one) => one.value));
const composer = new Composer(Number(mostImageBytes), changed);
const columns = new Columns(form, $("columns"), changed);
const keeper = new Keeper(user, current);
let talk = newTalk([valuesOf(form)]);
let runs = [];
let lastSent = null;

function current() {
  talk.settings = columns.values;
  talk.draft = composer.draft;
  return talk;
}

/** Return the requests of a turn, one for each column; null and a message if one is invalid. */
function requestsOf(turn) {
  try {
    const bodies = columns.values.map((values) => {
      const { input, previous } = given(talk, turn, values.column);
      const body = { ...bodyOf(values), input, stream: true };
      return previous ? { ...body, previous_response_id: previous } : body;
    });
    complain("");
    return bodies;
  } catch (error) {
    complain(error.message);
    return null;
  }
}

/** Show the request as code: the one in the form, or the last one sent if the form is empty. */
function showCode() {
  const turn = composer.turn(talk.leaf);
  const bodies = requestsOf(turn);
  if (!bodies) return;
  const body = isEmpty(turn) && lastSent ? lastSent : bodies[columns.chosen];
  $("as-curl").textContent = asCurl(origin, body);
  $("as-python").textContent = asPython(origin, body);
}

function changed() {
  composer.offerImages(columns.values.some(({ model }) => seeing.has(model)));
  showCode();
  keeper.keepLater();
}

function open(next) {
  stop();
  runs = [];
  lastSent = null;
  talk = next;
  columns.values = talk.settings;
  composer.draft = talk.draft;
  draw();
}

/** Show the branch; return the element of its last turn. */
function draw() {
  const path = pathTo(talk, talk.leaf);
  const elements = path.map((turn) => drawTurn(talk, turn, { edit, again, show }));
  $("turns").replaceChildren(...elements);
  $("hint")?.toggleAttribute("hidden", path.length > 0);
  path.forEach((turn, place) => turn.answers.forEach((answer, column) => {
    if (isOpen(answer) && !runs.length) recoverInto(elements[place].answers[column], answer);
  }));
  settle();
  return elements.at(-1);
}

/** Update the buttons, the fields for results and the code after a change of the conversation. */
function settle() {
  const isRunning = runs.length > 0;
  $("stop").hidden = !isRunning;
  $("stop").disabled = false;
  $("send").disabled = isRunning;
  for (const bar of document.querySelectorAll(".turn-bar")) bar.inert = isRunning;
  composer.askForResults(isRunning ? null : talk.turns[talk.leaf]);
  showCode();
}

/** Fetch an answer that was running when the user left the page. */
async function recoverInto(view, answer) {
  const own = talk;
  if (answer.id) await recover(answer).catch((fault) => { answer.error = { message: fault.message }; });
  if (isOpen(answer) && !(answer.id && answer.isKept)) {
    answer.status = "failed";
    answer.error ??= { message: "The page was left before the answer began." };
  }
  if (own !== talk) return;
  showEnd(view, answer);
  settle();
  keeper.keep();
}

/** Send a turn to each model, and show the answers. */
async function send({ parent, input, results }, bodies) {
  const own = talk;
  const { values } = columns;
  const answers = bodies.map((body, place) => newAnswer(body.model, values[place].column));
  const turn = addTurn(talk, parent, input, results, answers);
  const begun = turn.answers.map((answer) => new Run(answer, () => keeper.keep()));
  [lastSent] = bodies;
  runs = begun;
  const element = draw();
  element.scrollIntoView({ block: "nearest" });
  keeper.keep().then(() => keeper.list());
  await Promise.all(begun.map(async (run, column) => {
    await run.send(bodies[column], element.answers[column]);
    showEnd(element.answers[column], turn.answers[column], true);
  }));
  if (own !== talk) return;
  runs = [];
  settle();
  keeper.keep();
}

function stop() {
  $("stop").disabled = true;
  for (const run of runs) run.stop();
}

function again(turn) {
  const bodies = requestsOf(turn);
  if (bodies) send(turn, bodies);
}

function edit(turn, said, text) {
  const content = typeof said.content === "string"
    ? text
    : [{ type: "input_text", text }, ...said.content.filter((part) => !("text" in part))];
  again({ ...turn, input: turn.input.map((item) => (item === said ? { ...item, content } : item)) });
}

function show(turn) {
  choose(talk, turn);
  draw();
  keeper.keep();
}

/** Switch to another conversation. The present one is not stored if it is empty. */
async function goTo(next) {
  const left = current();
  const { id, leaf, draft } = left;
  open(next); // Before the save: what is typed from now on belongs to this one.
  await (leaf || draft.text || draft.images.length ? keeper.keep(left) : keeper.forget(id));
  await keeper.keep();
  await keeper.list();
}

/** Open a stored response, chat completion, conversation or prompt as a new conversation. */
async function openStored(id) {
  const address = new URL(location);
  address.searchParams.delete("open");
  history.replaceState(null, "", address);
  const found = await asked(`/admin/playground/open/${encodeURIComponent(id)}`);
  const { model = "" } = found.request;
  const next = newTalk([valuesFrom(found.request)]);
  addItems(next, found.items, model);
  if (found.draft) next.draft.text = found.draft;
  open(next);
  const models = [...form.elements.model.options].map((one) => one.value);
  const told = [`Opened ${found.id}.`];
  if (found.is_cut) told.push(`Only its newest ${found.items.length} items.`);
  if (model && !models.includes(model)) told.push(`The model ${model} is not available here.`);
  say(told.join(" "));
  await keeper.keep();
}

/** Begin a new conversation with a model. */
async function openModel(model) {
  const address = new URL(location);
  address.searchParams.delete("model");
  history.replaceState(null, "", address);
  if (![...form.elements.model.options].some((one) => one.value === model)) {
    throw new Error(`The model ${model} is not available here.`);
  }
  open(newTalk([{ ...valuesOf(form), model }]));
  await keeper.keep();
}

async function begin() {
  const { searchParams } = new URL(location);
  const [wanted, model] = [searchParams.get("open"), searchParams.get("model")];
  try {
    if (wanted) await openStored(wanted);
    else if (model) await openModel(model);
    else {
      const last = await keeper.last();
      if (last) open(last);
    }
  } catch (fault) {
    complain(fault.message);
  }
  $("turns").lastElementChild?.scrollIntoView({ block: "nearest" });
  await keeper.list();
}

$("compose").addEventListener("submit", (event) => {
  event.preventDefault();
  const turn = composer.turn(talk.leaf);
  if (runs.length || isEmpty(turn)) return;
  const bodies = requestsOf(turn);
  if (!bodies) return;
  composer.draft = { text: "", images: [] };
  composer.focus();
  send(turn, bodies);
});
$("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("compose").requestSubmit();
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open], :popover-open")) stop();
});
form.addEventListener("submit", (event) => event.preventDefault());
for (const part of [form, $("compose")]) part.addEventListener("input", changed);
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", () => {
  goTo(newTalk(columns.values));
  composer.focus();
});
$("talks").addEventListener("change", async ({ target }) => {
  const found = await keeper.load(target.value);
  if (found) await goTo(found);
});
$("forget").addEventListener("click", async () => {
  const { id } = talk;
  const title = $("talks").selectedOptions[0]?.textContent;
  if (!confirm(`Delete “${title}” from this browser?`)) return;
  open(newTalk(columns.values));
  await keeper.forget(id);
  await keeper.list();
});
for (const control of document.querySelectorAll("[data-copy]")) {
  control.addEventListener("click", () => copyFrom(control, $(control.dataset.copy).textContent));
}
if (matchMedia("(max-width: 60rem)").matches) {
  document.querySelector(".settings-fold").open = false;
}
showPresets(form);
changed();
await begin();
