import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { z } from "zod";
import { getWeather, holds, key, model, step, sunny, url, weather } from "./report.mjs";

// Versions before 1 put the arguments in a context.
const get_weather = createTool({ id: "get_weather", description: "Get the weather", inputSchema: z.object({ city: z.string() }), execute: (input) => getWeather(input.context ?? input) });
const played = { id: `site/${model}`, url: `${url}/v1`, apiKey: key };
const agent = new Agent({ id: "a", name: "a", instructions: "Be brief.", model: played, tools: { get_weather } });

await step("tool loop", async () => holds((await agent.generate(weather)).text, sunny));
await step("stream", async () => {
  let text = "";
  for await (const piece of (await agent.stream(weather)).textStream) text += piece;
  holds(text, sunny);
});
