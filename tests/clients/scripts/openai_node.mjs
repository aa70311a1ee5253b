import OpenAI from "openai";
import { getWeather, holds, key, model, small, step, sunny, url, weather } from "./report.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key });
const parameters = { type: "object", properties: { city: { type: "string" } } };
const hello = [{ role: "user", content: "Hello" }];

await step("chat", async () => {
  for (const name of [model, small]) {
    const answer = await client.chat.completions.create({ model: name, messages: hello, max_tokens: 20 });
    if (!answer.choices[0].message.content) throw new Error("no text");
  }
});
await step("stream", async () => {
  let text = "";
  const chunks = await client.chat.completions.create({ model: small, messages: hello, max_tokens: 20, stream: true });
  for await (const chunk of chunks) text += chunk.choices[0]?.delta?.content ?? "";
  if (!text) throw new Error("no text");
});
await step("tool loop", async () => {
  const runner = client.chat.completions.runTools({
    model,
    messages: [{ role: "user", content: weather }],
    tools: [{ type: "function", function: { name: "get_weather", parse: JSON.parse, parameters, function: getWeather } }],
  });
  holds(await runner.finalContent(), sunny);
});
await step("responses: stream, tool loop", async () => {
  const tools = [{ type: "function", name: "get_weather", parameters, strict: false }];
  const first = await client.responses.stream({ model, input: weather, tools }).finalResponse();
  const call = first.output.find((item) => item.type === "function_call");
  const output = { type: "function_call_output", call_id: call.call_id, output: getWeather(JSON.parse(call.arguments)) };
  const second = await client.responses.create({ model, input: [output], previous_response_id: first.id, tools });
  holds(second.output_text, sunny);
});
