import Anthropic from "@anthropic-ai/sdk";
import { getWeather, holds, key, model, small, step, sunny, url, weather } from "./report.mjs";

const client = new Anthropic({ baseURL: url, authToken: key, apiKey: null });
const hello = [{ role: "user", content: "Hello" }];

await step("chat", async () => {
  for (const name of [model, small]) {
    const answer = await client.messages.create({ model: name, messages: hello, max_tokens: 20 });
    if (!answer.content[0].text) throw new Error("no text");
  }
});
await step("stream", async () => {
  const message = await client.messages.stream({ model: small, messages: hello, max_tokens: 20 }).finalMessage();
  if (!message.content[0].text) throw new Error("no text");
});
await step("tool loop", async () => {
  const messages = [{ role: "user", content: weather }];
  const tools = [{ name: "get_weather", input_schema: { type: "object", properties: { city: { type: "string" } } } }];
  const first = await client.messages.create({ model, messages, tools, max_tokens: 100 });
  const use = first.content.find((block) => block.type === "tool_use");
  messages.push({ role: "assistant", content: first.content });
  messages.push({ role: "user", content: [{ type: "tool_result", tool_use_id: use.id, content: getWeather(use.input) }] });
  const second = await client.messages.create({ model, messages, tools, max_tokens: 100 });
  holds(second.content[0].text, sunny);
});
