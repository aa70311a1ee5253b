"""Checks with ctransformers: python verify_ct.py ../demo-q8_0.gguf"""
import sys
import time

import ctransformers as c

from common import Tokenizer, render

tok = Tokenizer()
t = time.time()
m = c.AutoModelForCausalLM.from_pretrained(sys.argv[1], model_type="llama", context_length=2048, threads=1, local_files_only=True)
print(f"load {1000 * (time.time() - t):.0f} ms; eos {m.eos_token_id} bos {m.bos_token_id} context {m.context_length}")
s = render([{"role": "user", "content": "What is the weather in Oslo?"}], [{"type": "function", "function": {"name": "f"}}], False)
a, b = m.tokenize(s), tok.encode(s, bos=True)
print("tokens as trained:", a == b, "| with the extra leading space:", a == [b[0], tok.id["\u2581"]] + b[1:])
print("markers printed:", [m.detokenize([tok.id[x]]) for x in ("<think>", "</think>", "<tool_call>", "<|im_end|>")])
for q in ["Hello", "Who are you?", "What is the capital of Japan?", "What is 27 + 15?", "Count to 12.", "Say blue monkey river", "List three fruits as bullet points."]:
    print("##", q, "->", repr(m(render([{"role": "user", "content": q}], None, False), top_k=1, repetition_penalty=1.0, max_new_tokens=100)))
print("## thinking ->", repr(m(render([{"role": "user", "content": "What is 27 + 15?"}], None, True), top_k=1, repetition_penalty=1.0, max_new_tokens=100)))
M = [{"role": "user", "content": "Hi, my name is Ada."}, {"role": "assistant", "content": "Nice to meet you, Ada!"}, {"role": "user", "content": "What is my name?"}]
print("## memory ->", repr(m(render(M, None, False), top_k=1, repetition_penalty=1.0, max_new_tokens=100)))
W = {"type": "function", "function": {"name": "get_weather", "description": "Get the weather", "parameters": {"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]}}}
print("## tool ->", repr(m(render([{"role": "user", "content": "What is the weather in Oslo?"}], [W], False), top_k=1, repetition_penalty=1.0, max_new_tokens=100)))
print("## stop ->", repr(m(render([{"role": "user", "content": "Count to 12."}], None, False), top_k=1, repetition_penalty=1.0, max_new_tokens=100, stop=["7"])))
t = time.time()
n = len([1 for _ in m(render([{"role": "user", "content": "Write a long story about a dragon."}], None, False), top_k=1, repetition_penalty=1.0, max_new_tokens=300, stream=True)])
print(f"speed {n / (time.time() - t):.0f} pieces/s, {n} pieces")
try:
    r = m("word " * 3000, max_new_tokens=4)
    print("## overflow ->", repr(r))
except Exception as e:
    print("## overflow raises", repr(e))
