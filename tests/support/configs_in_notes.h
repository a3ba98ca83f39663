#pragma once
/// DeepSpeed configurations as users write them in notes and tutorials, trailing commas included.

namespace rz::test {

/// For Hugging Face's Trainer.
inline constexpr const char* trainer_config = R"({
"fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
  "min_loss_scale": 1},
"bf16": {"enabled": false},
"zero_optimization": {"stage": 3,
  "offload_optimizer": {"device": "none", "pin_memory": true}, "offload_param": {"device": "none", "pin_memory": true},
  "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
  "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
  "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
  "stage3_gather_16bit_weights_on_model_save": true},
"gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 100,
"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "wall_clock_breakdown": false})";

/// Of a teacher that only runs inference, and of the student.
inline constexpr const char* teacher_config = R"({
"bf16": {"enabled": "auto"},
"zero_optimization": {"stage": 3, "overlap_comm": true, "reduce_bucket_size": "auto",
"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
"stage3_max_live_parameters": "auto",
"stage3_max_reuse_distance": "auto",
},
"train_micro_batch_size_per_gpu": 1
})";

inline constexpr const char* student_config = R"({
"bf16": {"enabled": "auto"},
"optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": true, "adam_w_mode": true}},
"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": true},
},
"gradient_accumulation_steps": 1, "gradient_clipping": "auto", "train_batch_size": "auto",
"train_micro_batch_size_per_gpu": "auto",
})";

/// The plugin that an Accelerate configuration file describes.
inline constexpr const char* accelerate_config = R"({
"gradient_accumulation_steps": 1, "gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": "auto",
"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
"stage3_gather_16bit_weights_on_model_save": true}})";

}  // namespace rz::test
