import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { getWeather, holds, key, model, small, step, sunny, url, weather } from "./report.mjs";

const compatible = createOpenAICompatible({ name: "site", baseURL: `${url}/v1`, apiKey: key });
const models = {
  "chat completions": compatible(model),
  responses: createOpenAI({ baseURL: `${url}/v1`, apiKey: key }).responses(model),
  messages: createAnthropic({ baseURL: `${url}/v1`, apiKey: key })(model),
};
const tools = {
  get_weather: tool({ description: "Get the weather", inputSchema: z.object({ city: z.string() }), execute: getWeather }),
};

await step("stream", async () => {
  let text = "";
  for await (const piece of streamText({ model: compatible(small), prompt: "Hello", maxOutputTokens: 20 }).textStream) text += piece;
  if (!text) throw new Error("no text");
});
for (const [name, by] of Object.entries(models)) {
  await step(`${name}: tool loop`, async () => {
    const { text } = await generateText({ model: by, prompt: weather, tools, stopWhen: stepCountIs(3) });
    holds(text, sunny);
  });
}
