"""Words of verl, OpenRLHF, TRL and ms-swift for what has another key here. A page of the reference is
made from this table."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class PeerWords:
    """What others call a key. Several words of one peer are of its versions, trainers or algorithms."""

    here: list[str]
    """The key, or the keys that share what others have in one."""
    verl: list[str]
    openrlhf: list[str]
    trl: list[str]
    swift: list[str]
    loose: list[str]
    """Words that people type and nobody's documentation has."""
    note: str
    """What differs, beside the name."""

    @property
    def advice(self) -> str:
        """The way out, as the end of a line."""
        return f"here: {' and '.join(self.here)}" + (f" ({self.note})" if self.note else "")

    @property
    def words(self) -> Iterator[str]:
        """All words, of all peers."""
        for peer in (*PEERS, "loose"):
            yield from getattr(self, peer)


PEERS = {"verl": "verl", "openrlhf": "OpenRLHF", "trl": "TRL", "swift": "ms-swift"}
"""Names of the peers by their fields."""
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def _row(
    here: str, verl: str, openrlhf: str = "", trl: str = "", swift: str = "", loose: str = "", note: str = ""
) -> PeerWords:
    """Make a row of words with blanks between them."""
    split = str.split
    return PeerWords(split(here), split(verl), split(openrlhf), split(trl), split(swift), split(loose), note)


TABLE = (
    # what a run starts from
    _row(
        "model.policy",
        "actor_rollout_ref.model.path",
        "pretrain",
        "model_name_or_path sft_model_path",
        "model",
        loose="model_path policy",
    ),
    _row("model.reference", "", "", "ref_model", "ref_model", loose="reference"),
    _row("model.critic", "critic.model.path", "critic_pretrain", "value_model"),
    _row(
        "reward.components.rm.path",
        "reward_model.model.path",
        "reward_pretrain",
        "reward_model_path",
        "reward_model",
        note="with reward=model",
    ),
    _row(
        "reward.components.rule.function",
        "custom_reward_function.path custom_reward_function.name",
        "",
        "reward_funcs",
        "reward_funcs",
        loose="reward_function reward_fn",
        note="with reward=rule",
    ),
    _row("reward.components.remote.url", "", "remote_rm_url", note="with reward=remote"),
    _row(
        "reward.components.rm.weight",
        "",
        "",
        "reward_weights",
        "reward_weights",
        note="one for each component, by its name",
    ),
    _row("data.prompts", "data.train_files", "prompt_data", "dataset_name", "dataset", loose="train_dataset"),
    _row("data.heldout", "data.val_files", "eval_dataset", "eval_dataset", "val_dataset"),
    _row("data.prompt_column", "data.prompt_key", "input_key"),
    _row("data.split", "", "prompt_split", "dataset_train_split"),
    _row("data.shuffle", "", "", "shuffle_dataset", "dataset_shuffle"),
    _row(
        "data.max_prompt_tokens",
        "data.max_prompt_length",
        "prompt_max_len",
        "max_prompt_length",
        "max_length",
    ),
    _row("data.long_prompts", "data.truncation", "", "", "truncation_strategy"),
    # sizes
    _row(
        "data.prompts_per_iteration",
        "data.train_batch_size",
        "rollout_batch_size",
        "generation_batch_size",
        "generation_batch_size",
        loose="batch_size",
        note="prompts, not responses, of one iteration",
    ),
    _row(
        "rollout.samples_per_prompt",
        f"{_ROLLOUT}.n",
        "n_samples_per_prompt",
        "num_generations",
        "num_generations",
        loose="n group_size num_samples",
    ),
    _row(
        "update.minibatches",
        f"{_ACTOR}.ppo_mini_batch_size",
        "train_batch_size",
        "num_mini_batches steps_per_generation",
        "steps_per_generation",
        loose="mini_batch_size",
        note="how many there are in an iteration, not how large one is",
    ),
    _row(
        "update.tokens_per_micro_batch",
        f"{_ACTOR}.ppo_max_token_len_per_gpu {_ACTOR}.ppo_micro_batch_size_per_gpu",
        "micro_train_batch_size train_max_tokens_per_gpu",
        "per_device_train_batch_size",
        "per_device_train_batch_size",
        loose="micro_batch_size gradient_accumulation_steps",
        note="tokens, not sequences",
    ),
    _row(
        "rollout.tokens_per_batch",
        "",
        "micro_rollout_batch_size rollout_max_tokens_per_gpu",
        note="tokens, not sequences",
    ),
    _row(
        "iterations",
        "trainer.total_training_steps trainer.total_epochs",
        "num_episodes",
        "max_steps num_train_epochs total_episodes",
        "max_steps num_train_epochs",
        loose="steps num_steps",
        note="rollouts with an update each, not passes over the prompts",
    ),
    # sampling
    _row(
        "rollout.max_new_tokens",
        f"data.max_response_length {_ROLLOUT}.response_length",
        "generate_max_len",
        "max_completion_length response_length",
        "max_completion_length",
        loose="max_tokens max_new_tokens",
    ),
    _row("rollout.temperature", f"{_ROLLOUT}.temperature", "temperature", "temperature", "temperature"),
    _row("rollout.top_p", f"{_ROLLOUT}.top_p", "top_p", "top_p", "top_p"),
    _row("rollout.top_k", f"{_ROLLOUT}.top_k", "", "top_k", "top_k", note="0 is off"),
    _row("rollout.stop_token_ids", "", "", "stop_token_id"),
    _row("rollout.engine", f"{_ROLLOUT}.name", "", "use_vllm", "use_vllm", note="or rollout=vllm"),
    _row("rollout.multi_turn.scheduler", "", "agent_func_path", "", "multi_turn_scheduler"),
    _row(
        "rollout.multi_turn.max_turns",
        f"{_ROLLOUT}.multi_turn.max_turns",
        "",
        "max_tool_calling_iterations",
        "max_turns",
    ),
    _row(
        "rollout.vllm.gpu_memory_utilization",
        f"{_ROLLOUT}.gpu_memory_utilization",
        "vllm_gpu_memory_utilization",
        "vllm_gpu_memory_utilization",
        "vllm_gpu_memory_utilization",
    ),
    _row(
        "rollout.vllm.tensor_parallel_size",
        f"{_ROLLOUT}.tensor_model_parallel_size",
        "vllm_tensor_parallel_size",
        "vllm_tensor_parallel_size",
        "vllm_tensor_parallel_size",
    ),
    _row("rollout.vllm.max_model_len", f"{_ROLLOUT}.max_model_len", "", "", "vllm_max_model_len"),
    _row("rollout.vllm.enforce_eager", f"{_ROLLOUT}.enforce_eager", "enforce_eager"),
    # training
    _row(
        "update.learning_rate",
        f"{_ACTOR}.optim.lr",
        "actor_learning_rate",
        "learning_rate",
        "learning_rate",
        loose="lr actor_lr",
    ),
    _row("update.critic_learning_rate", "critic.optim.lr", "critic_learning_rate", loose="critic_lr"),
    _row(
        "update.epochs",
        f"{_ACTOR}.ppo_epochs",
        "max_epochs",
        "num_iterations num_ppo_epochs",
        "num_iterations",
        loose="ppo_epochs epochs",
        note="passes over the responses of an iteration",
    ),
    _row(
        "update.schedule",
        f"{_ACTOR}.optim.warmup_style",
        "lr_scheduler",
        "lr_scheduler_type",
        "lr_scheduler_type",
    ),
    _row(
        "update.warmup_steps",
        f"{_ACTOR}.optim.lr_warmup_steps {_ACTOR}.optim.lr_warmup_steps_ratio",
        "lr_warmup_ratio",
        "warmup_steps warmup_ratio",
        "warmup_steps warmup_ratio",
        note="optimizer steps, not a share of them",
    ),
    _row("update.weight_decay", f"{_ACTOR}.optim.weight_decay", "l2", "weight_decay", "weight_decay"),
    _row("update.betas", "", "adam_betas", "adam_beta1 adam_beta2", "adam_beta1 adam_beta2"),
    _row("update.epsilon", "", "", "adam_epsilon", "adam_epsilon"),
    _row("update.max_grad_norm", f"{_ACTOR}.grad_clip", "max_norm", "max_grad_norm", "max_grad_norm"),
    _row("update.zero_stage", "", "zero_stage", "deepspeed", "deepspeed", note="or update=zero2, zero3"),
    _row(
        "update.precision", "", "bf16", "bf16 fp16 dtype", "torch_dtype bf16 fp16", note="bf16, fp16 or fp32"
    ),
    _row(
        "update.activation_checkpointing",
        "actor_rollout_ref.model.enable_gradient_checkpointing",
        "gradient_checkpointing",
        "gradient_checkpointing",
        "gradient_checkpointing",
    ),
    _row("update.offload_optimizer", f"{_ACTOR}.fsdp_config.optimizer_offload", "adam_offload"),
    _row("update.attention", "", "attn_implementation", "attn_implementation", "attn_impl"),
    _row(
        "update.remove_padding",
        "actor_rollout_ref.model.use_remove_padding",
        "packing_samples",
        "",
        "padding_free",
    ),
    _row("update.lora.rank", "actor_rollout_ref.model.lora_rank", "lora_rank", "lora_r", "lora_rank"),
    _row("update.lora.alpha", "actor_rollout_ref.model.lora_alpha", "lora_alpha", "lora_alpha", "lora_alpha"),
    _row(
        "update.lora.target_modules",
        "actor_rollout_ref.model.target_modules",
        "target_modules",
        "lora_target_modules",
        "target_modules",
    ),
    # the algorithm
    _row(
        "algorithm.estimator",
        "algorithm.adv_estimator",
        "advantage_estimator",
        "",
        "rlhf_type advantage_estimator",
        loose="adv_estimator",
        note="algorithm=grpo and others set all that belongs to one",
    ),
    _row("algorithm.gamma", "algorithm.gamma", "gamma", "gamma"),
    _row("algorithm.lam", "algorithm.lam", "lambd", "lam", loose="gae_lambda"),
    _row(
        "algorithm.clip_range_low algorithm.clip_range_high",
        f"{_ACTOR}.clip_ratio",
        "eps_clip eps_clip_low_high",
        "cliprange",
        loose="clip_range clip_ratio clip_eps",
        note="one for each side",
    ),
    _row("algorithm.clip_range_low", f"{_ACTOR}.clip_ratio_low", "", "epsilon", "epsilon"),
    _row("algorithm.clip_range_high", f"{_ACTOR}.clip_ratio_high", "", "epsilon_high", "epsilon_high"),
    _row("algorithm.dual_clip", f"{_ACTOR}.clip_ratio_c", "dual_clip", "delta", "delta"),
    _row(
        "algorithm.value_clip_range",
        "critic.cliprange_value",
        "value_clip",
        "cliprange_value",
        "cliprange_value",
    ),
    _row("algorithm.loss_aggregation", f"{_ACTOR}.loss_agg_mode", "", "loss_type", "loss_type"),
    _row(
        "algorithm.normalize_group_std",
        "algorithm.norm_adv_by_std_in_grpo",
        "no_advantage_std_norm",
        "scale_rewards",
        "scale_rewards",
    ),
    _row("algorithm.whiten_rewards", "", "", "whiten_rewards", "whiten_rewards"),
    _row(
        "algorithm.entropy_coef",
        f"{_ACTOR}.entropy_coeff",
        "entropy_loss_coef",
        loose="entropy_coeff ent_coef",
    ),
    _row(
        "algorithm.kl.coef",
        f"algorithm.kl_ctrl.kl_coef {_ACTOR}.kl_loss_coef",
        "init_kl_coef",
        "beta kl_coef",
        "beta",
        loose="kl_beta kl_loss_coef kl_penalty_coef",
    ),
    _row(
        "algorithm.kl.placement",
        f"algorithm.use_kl_in_reward {_ACTOR}.use_kl_loss",
        "use_kl_loss",
        "",
        "kl_in_reward",
        note="reward or loss",
    ),
    _row(
        "algorithm.kl.estimator",
        f"algorithm.kl_penalty {_ACTOR}.kl_loss_type",
        "kl_estimator",
        "kl_estimator",
    ),
    _row("algorithm.kl.controller", "algorithm.kl_ctrl.type"),
    _row("algorithm.kl.target", "algorithm.kl_ctrl.target_kl", "kl_target"),
    _row("algorithm.kl.horizon", "algorithm.kl_ctrl.horizon", "kl_horizon"),
    _row("algorithm.shaping.normalize", "", "normalize_reward"),
    _row("algorithm.shaping.clip", "", "reward_clip_range"),
    _row("algorithm.shaping.missing_eos_penalty", "", "", "missing_eos_penalty", "missing_eos_penalty"),
    _row(
        "algorithm.shaping.overlong_buffer",
        "reward_model.overlong_buffer.len",
        "overlong_buffer_len",
        "",
        "soft_cache_length",
    ),
    _row(
        "algorithm.shaping.overlong_penalty",
        "reward_model.overlong_buffer.penalty_factor",
        "overlong_penalty_factor",
    ),
    _row(
        "algorithm.shaping.filter_groups",
        "algorithm.filter_groups.enable",
        "dynamic_filtering",
        "",
        "dynamic_sample",
    ),
    _row(
        "algorithm.correction.level",
        "",
        "enable_vllm_is_correction",
        "vllm_importance_sampling_correction vllm_importance_sampling_mode",
        "rollout_importance_sampling_mode",
    ),
    _row(
        "algorithm.correction.high",
        "",
        "vllm_is_truncated_threshold",
        "vllm_importance_sampling_cap",
        "rollout_importance_sampling_threshold",
    ),
    # around it
    _row("run_dir", "trainer.default_local_dir", "save_path ckpt_path", "output_dir", "output_dir"),
    _row("name", "trainer.experiment_name", "wandb_run_name", "run_name", "run_name"),
    _row("tracking.wandb.project", "trainer.project_name", "wandb_project", loose="project"),
    _row("tracking.wandb.entity", "", "wandb_org"),
    _row("tracking.wandb.group", "", "wandb_group"),
    _row(
        "tracking.wandb.mode",
        "trainer.logger",
        "use_wandb",
        "report_to",
        "report_to",
        note="or tracking=none",
    ),
    _row("evaluate.every", "trainer.test_freq", "eval_steps", "eval_steps", "eval_steps", note="iterations"),
    _row(
        "evaluate.samples_per_prompt",
        f"{_ROLLOUT}.val_kwargs.n",
        "eval_n_samples_per_prompt",
        "num_generations_eval",
    ),
    _row("evaluate.temperature", f"{_ROLLOUT}.val_kwargs.temperature", "eval_temperature"),
    _row(
        "update.keep_every",
        "trainer.save_freq",
        "save_steps",
        "save_steps",
        "save_steps",
        note="every iteration is committed; this says which older ones are kept",
    ),
    _row(
        "update.keep_last",
        "trainer.max_actor_ckpt_to_keep",
        "max_ckpt_num",
        "save_total_limit",
        "save_total_limit",
    ),
    _row(
        "scheduler.update.gpus_per_node",
        "trainer.n_gpus_per_node",
        "actor_num_gpus_per_node",
        note="with scheduler=slurm, for each stage",
    ),
    _row("scheduler.update.nodes", "trainer.nnodes", "actor_num_nodes", note="with scheduler=slurm"),
)
