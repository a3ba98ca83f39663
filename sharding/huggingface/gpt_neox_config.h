#pragma once
/// The config.json of a GPT-NeoX, such as Pythia, in Hugging Face's format.

#include "sharding/huggingface/model_family.h"

namespace rz {

/// Reads the spellings of transformers 4 (rotary_pct, rotary_emb_base, rope_scaling), which it writes, and 5
/// (rope_parameters). Refuses a hidden_act that GptNeoxConfig does not name, rotary scaling except linear,
/// dynamic and llama3, an odd number of rotated channels, and quantized weights. Keys without effect here are
/// ignored. Old files have masks of attention and frequencies of the rotation beside weights.
extern const ModelFamily gpt_neox_family;

}  // namespace rz
