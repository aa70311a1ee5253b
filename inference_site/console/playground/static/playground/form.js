// The form of the settings: converts its fields to stored values, to a request, and from a request.

const NUMBERS = [
  "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "seed",
  "max_output_tokens",
];
const FIELDS = ["model", "instructions", ...NUMBERS, "effort", "tools", "schema", "extra"];
const OF_THE_PAGE = ["stream", "input", "previous_response_id"];

function json(values, name, label) {
  const text = values[name]?.trim();
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${label}: ${error.message}`);
  }
}

/** Return the values of the form's fields. */
export function valuesOf(form) {
  return Object.fromEntries(FIELDS.map((name) => [name, form.elements[name].value]));
}

/** Set the fields; instead of a model that no longer exists, the first one stays selected. */
export function fill(form, values) {
  for (const name of FIELDS) {
    const field = form.elements[name];
    field.value = values[name] ?? "";
    if (field.selectedIndex === -1) field.selectedIndex = 0;
  }
}

/** Return values of the form as a request body; throw an Error for invalid JSON. */
export function bodyOf(values) {
  const body = { model: values.model };
  if (values.instructions?.trim()) body.instructions = values.instructions;
  for (const name of NUMBERS) {
    if (values[name]) body[name] = Number(values[name]);
  }
  if (values.effort) body.reasoning = { effort: values.effort };
  const tools = json(values, "tools", "Tools");
  if (tools !== undefined) body.tools = tools;
  const schema = json(values, "schema", "JSON schema");
  if (schema !== undefined) body.text = { format: { type: "json_schema", name: "answer", schema } };
  const extra = json(values, "extra", "Other parameters") ?? {};
  if (typeof extra !== "object" || Array.isArray(extra)) {
    throw new Error("Other parameters: expected a JSON object.");
  }
  for (const name of OF_THE_PAGE) delete extra[name];
  return { ...body, ...extra };
}

/** Return the values of the form for a request; parameters without a field go to "extra". */
export function valuesFrom(request) {
  const { model = "", instructions, reasoning, tools, text, ...rest } = request;
  const values = { model };
  if (typeof instructions === "string") values.instructions = instructions;
  else if (instructions) rest.instructions = instructions;
  for (const name of NUMBERS) {
    if (typeof rest[name] !== "number") continue;
    values[name] = String(rest[name]);
    delete rest[name];
  }
  if (reasoning?.effort && Object.keys(reasoning).length === 1) values.effort = reasoning.effort;
  else if (reasoning) rest.reasoning = reasoning;
  if (tools?.length) values.tools = JSON.stringify(tools, null, 2);
  if (text?.format?.type === "json_schema") values.schema = JSON.stringify(text.format.schema, null, 2);
  else if (text) rest.text = text;
  if (Object.keys(rest).length) values.extra = JSON.stringify(rest, null, 2);
  return values;
}
