"""python export_gguf.py ck.pt ../demo [license]  ->  ../demo-f16.gguf, ../demo-q8_0.gguf"""
import sys

import gguf
import numpy as np
import torch

from common import TEMPLATE_SOURCE, Tokenizer

ck, out = torch.load(sys.argv[1]), sys.argv[2]
license_name = sys.argv[3] if len(sys.argv) > 3 else "Apache-2.0"
c, sd = ck["config"], {k: v.float().numpy() for k, v in ck["model"].items()}
tok = Tokenizer()


def write(path, quant):
    w = gguf.GGUFWriter(path, "llama")
    w.add_name("Demo Chat 3M")
    w.add_description("Tiny chat model for demonstrations and tests, trained from scratch on generated text.")
    w.add_license(license_name)
    w.add_languages(["en"])
    w.add_size_label("3M")
    # defaults that llama.cpp uses when a request names none (a tiny model likes it cool)
    w.add_sampling_temp(0.3)
    w.add_sampling_top_k(20)
    w.add_sampling_min_p(0.1)
    w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if quant else gguf.LlamaFileType.MOSTLY_F16)
    w.add_context_length(c["ctx"])
    w.add_embedding_length(c["dim"])
    w.add_block_count(c["layers"])
    w.add_feed_forward_length(c["ff"])
    w.add_head_count(c["heads"])
    w.add_head_count_kv(c["kv_heads"])
    w.add_layer_norm_rms_eps(c["eps"])
    w.add_rope_dimension_count(c["dim"] // c["heads"])
    w.add_rope_freq_base(c["rope_base"])
    w.add_vocab_size(c["vocab"])
    w.add_tokenizer_model("llama")
    w.add_tokenizer_pre("default")
    w.add_token_list([t.encode() for t in tok.tokens])
    w.add_token_scores(tok.scores)
    w.add_token_types(tok.types)
    w.add_bos_token_id(tok.bos)
    w.add_eos_token_id(tok.eos)
    w.add_unk_token_id(0)
    w.add_pad_token_id(2)
    w.add_add_bos_token(True)
    w.add_add_eos_token(False)
    w.add_add_space_prefix(False)
    w.add_chat_template(TEMPLATE_SOURCE)

    def t(name, x):
        x = np.ascontiguousarray(x)
        if x.ndim == 1:
            w.add_tensor(name, x.astype(np.float32))
        elif quant:
            q = gguf.GGMLQuantizationType.Q8_0
            w.add_tensor(name, gguf.quants.quantize(x, q), raw_dtype=q)
        else:
            w.add_tensor(name, x.astype(np.float16))
    for k, v in sd.items():
        if k == "output_norm":
            t("output_norm.weight", v)
        elif k == "token_embd.weight":
            t(k, v)
            t("output.weight", v)        # tied, but old engines want it spelled out
        else:
            t(k if k.endswith(".weight") else k + ".weight", v)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


write(out + "-f16.gguf", False)
write(out + "-q8_0.gguf", True)
