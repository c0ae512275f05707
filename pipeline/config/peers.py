"""Words of verl, OpenRLHF, TRL and ms-swift for what has another key here. The page of the reference on them
is made from this table."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, kw_only=True)
class PeerWords:
    """What others call a key. Several words of one peer are of its versions, trainers or algorithms."""

    here: tuple[str, ...]
    """The key, or the keys that share what others have in one."""
    verl: tuple[str, ...] = ()
    openrlhf: tuple[str, ...] = ()
    trl: tuple[str, ...] = ()
    swift: tuple[str, ...] = ()
    loose: tuple[str, ...] = ()
    """Words that people type and nobody's documentation has."""
    note: str = ""
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


def _row(here: str, note: str = "", **words: str) -> PeerWords:
    """Make a row of words with blanks between them."""
    given = {peer: tuple(text.split()) for peer, text in words.items()}
    return PeerWords(here=tuple(here.split()), note=note, **given)


TABLE = (
    # what a run starts from
    _row(
        "model.policy",
        verl="actor_rollout_ref.model.path",
        openrlhf="pretrain",
        trl="model_name_or_path sft_model_path",
        swift="model",
        loose="model_path policy",
    ),
    _row("model.reference", trl="ref_model", swift="ref_model", loose="reference"),
    _row("model.critic", verl="critic.model.path", openrlhf="critic_pretrain", trl="value_model"),
    _row(
        "reward.components.rm.path",
        "with reward=model",
        verl="reward_model.model.path",
        openrlhf="reward_pretrain",
        trl="reward_model_path",
        swift="reward_model",
    ),
    _row(
        "reward.components.rule.function",
        "with reward=rule",
        verl="custom_reward_function.path custom_reward_function.name",
        trl="reward_funcs",
        swift="reward_funcs",
        loose="reward_function reward_fn",
    ),
    _row("reward.components.remote.url", "with reward=remote", openrlhf="remote_rm_url"),
    _row(
        "reward.components.rm.weight",
        "one for each component, by its name",
        trl="reward_weights",
        swift="reward_weights",
    ),
    _row(
        "data.prompts",
        verl="data.train_files",
        openrlhf="prompt_data",
        trl="dataset_name",
        swift="dataset",
        loose="train_dataset",
    ),
    _row(
        "data.heldout",
        verl="data.val_files",
        openrlhf="eval_dataset",
        trl="eval_dataset",
        swift="val_dataset",
    ),
    _row("data.prompt_column", verl="data.prompt_key", openrlhf="input_key"),
    _row("data.split", openrlhf="prompt_split", trl="dataset_train_split"),
    _row("data.shuffle", trl="shuffle_dataset", swift="dataset_shuffle"),
    _row(
        "data.max_prompt_tokens",
        verl="data.max_prompt_length",
        openrlhf="prompt_max_len",
        trl="max_prompt_length",
        swift="max_length",
    ),
    _row("data.long_prompts", verl="data.truncation", swift="truncation_strategy"),
    # sizes
    _row(
        "data.prompts_per_iteration",
        "prompts, not responses, of one iteration",
        verl="data.train_batch_size",
        openrlhf="rollout_batch_size",
        trl="generation_batch_size",
        swift="generation_batch_size",
        loose="batch_size",
    ),
    _row(
        "rollout.samples_per_prompt",
        verl="actor_rollout_ref.rollout.n",
        openrlhf="n_samples_per_prompt",
        trl="num_generations",
        swift="num_generations",
        loose="n group_size num_samples",
    ),
    _row(
        "update.minibatches",
        "how many there are in an iteration, not how large one is",
        verl=f"{_ACTOR}.ppo_mini_batch_size",
        openrlhf="train_batch_size",
        trl="num_mini_batches steps_per_generation",
        swift="steps_per_generation",
        loose="mini_batch_size",
    ),
    _row(
        "update.tokens_per_micro_batch",
        "tokens, not sequences",
        verl=f"{_ACTOR}.ppo_max_token_len_per_gpu {_ACTOR}.ppo_micro_batch_size_per_gpu",
        openrlhf="micro_train_batch_size train_max_tokens_per_gpu",
        trl="per_device_train_batch_size",
        swift="per_device_train_batch_size",
        loose="micro_batch_size gradient_accumulation_steps",
    ),
    _row(
        "rollout.tokens_per_batch",
        "tokens, not sequences",
        openrlhf="micro_rollout_batch_size rollout_max_tokens_per_gpu",
    ),
    _row(
        "iterations",
        "rollouts with an update each, not passes over the prompts",
        verl="trainer.total_training_steps trainer.total_epochs",
        openrlhf="num_episodes",
        trl="max_steps num_train_epochs total_episodes",
        swift="max_steps num_train_epochs",
        loose="steps num_steps",
    ),
    # sampling
    _row(
        "rollout.max_new_tokens",
        verl="data.max_response_length actor_rollout_ref.rollout.response_length",
        openrlhf="generate_max_len",
        trl="max_completion_length response_length",
        swift="max_completion_length",
        loose="max_tokens max_new_tokens",
    ),
    _row(
        "rollout.temperature",
        verl=f"{_ROLLOUT}.temperature",
        openrlhf="temperature",
        trl="temperature",
        swift="temperature",
    ),
    _row("rollout.top_p", verl=f"{_ROLLOUT}.top_p", openrlhf="top_p", trl="top_p", swift="top_p"),
    _row("rollout.top_k", "0 is off", verl=f"{_ROLLOUT}.top_k", trl="top_k", swift="top_k"),
    _row("rollout.stop_token_ids", trl="stop_token_id"),
    _row("rollout.engine", "or rollout=vllm", verl=f"{_ROLLOUT}.name", trl="use_vllm", swift="use_vllm"),
    _row("rollout.multi_turn.scheduler", openrlhf="agent_func_path", swift="multi_turn_scheduler"),
    _row(
        "rollout.multi_turn.max_turns",
        verl=f"{_ROLLOUT}.multi_turn.max_turns",
        trl="max_tool_calling_iterations",
        swift="max_turns",
    ),
    _row(
        "rollout.vllm.gpu_memory_utilization",
        verl=f"{_ROLLOUT}.gpu_memory_utilization",
        openrlhf="vllm_gpu_memory_utilization",
        trl="vllm_gpu_memory_utilization",
        swift="vllm_gpu_memory_utilization",
    ),
    _row(
        "rollout.vllm.tensor_parallel_size",
        verl=f"{_ROLLOUT}.tensor_model_parallel_size",
        openrlhf="vllm_tensor_parallel_size",
        trl="vllm_tensor_parallel_size",
        swift="vllm_tensor_parallel_size",
    ),
    _row("rollout.vllm.max_model_len", verl=f"{_ROLLOUT}.max_model_len", swift="vllm_max_model_len"),
    _row("rollout.vllm.enforce_eager", verl=f"{_ROLLOUT}.enforce_eager", openrlhf="enforce_eager"),
    # training
    _row(
        "update.learning_rate",
        verl=f"{_ACTOR}.optim.lr",
        openrlhf="actor_learning_rate",
        trl="learning_rate",
        swift="learning_rate",
        loose="lr actor_lr",
    ),
    _row(
        "update.critic_learning_rate",
        verl="critic.optim.lr",
        openrlhf="critic_learning_rate",
        loose="critic_lr",
    ),
    _row(
        "update.epochs",
        "passes over the responses of an iteration",
        verl=f"{_ACTOR}.ppo_epochs",
        openrlhf="max_epochs",
        trl="num_iterations num_ppo_epochs",
        swift="num_iterations",
        loose="ppo_epochs epochs",
    ),
    _row(
        "update.schedule",
        verl=f"{_ACTOR}.optim.warmup_style",
        openrlhf="lr_scheduler",
        trl="lr_scheduler_type",
        swift="lr_scheduler_type",
    ),
    _row(
        "update.warmup_steps",
        "optimizer steps, not a share of them",
        verl=f"{_ACTOR}.optim.lr_warmup_steps {_ACTOR}.optim.lr_warmup_steps_ratio",
        openrlhf="lr_warmup_ratio",
        trl="warmup_steps warmup_ratio",
        swift="warmup_steps warmup_ratio",
    ),
    _row(
        "update.weight_decay",
        verl=f"{_ACTOR}.optim.weight_decay",
        openrlhf="l2",
        trl="weight_decay",
        swift="weight_decay",
    ),
    _row("update.betas", openrlhf="adam_betas", trl="adam_beta1 adam_beta2", swift="adam_beta1 adam_beta2"),
    _row("update.epsilon", trl="adam_epsilon", swift="adam_epsilon"),
    _row(
        "update.max_grad_norm",
        verl=f"{_ACTOR}.grad_clip",
        openrlhf="max_norm",
        trl="max_grad_norm",
        swift="max_grad_norm",
    ),
    _row(
        "update.zero_stage",
        "or update=zero2, zero3",
        openrlhf="zero_stage",
        trl="deepspeed",
        swift="deepspeed",
    ),
    _row(
        "update.precision",
        "bf16, fp16 or fp32",
        openrlhf="bf16",
        trl="bf16 fp16 dtype",
        swift="torch_dtype bf16 fp16",
    ),
    _row(
        "update.activation_checkpointing",
        verl="actor_rollout_ref.model.enable_gradient_checkpointing",
        openrlhf="gradient_checkpointing",
        trl="gradient_checkpointing",
        swift="gradient_checkpointing",
    ),
    _row(
        "update.offload_optimizer",
        verl=f"{_ACTOR}.fsdp_config.optimizer_offload",
        openrlhf="adam_offload",
    ),
    _row("update.attention", openrlhf="attn_implementation", trl="attn_implementation", swift="attn_impl"),
    _row(
        "update.remove_padding",
        verl="actor_rollout_ref.model.use_remove_padding",
        openrlhf="packing_samples",
        swift="padding_free",
    ),
    _row(
        "update.lora.rank",
        verl="actor_rollout_ref.model.lora_rank",
        openrlhf="lora_rank",
        trl="lora_r",
        swift="lora_rank",
    ),
    _row(
        "update.lora.alpha",
        verl="actor_rollout_ref.model.lora_alpha",
        openrlhf="lora_alpha",
        trl="lora_alpha",
        swift="lora_alpha",
    ),
    _row(
        "update.lora.target_modules",
        verl="actor_rollout_ref.model.target_modules",
        openrlhf="target_modules",
        trl="lora_target_modules",
        swift="target_modules",
    ),
    # the algorithm
    _row(
        "algorithm.estimator",
        "algorithm=grpo and others set all that belongs to one",
        verl="algorithm.adv_estimator",
        openrlhf="advantage_estimator",
        swift="rlhf_type advantage_estimator",
        loose="adv_estimator",
    ),
    _row("algorithm.gamma", verl="algorithm.gamma", openrlhf="gamma", trl="gamma"),
    _row("algorithm.lam", verl="algorithm.lam", openrlhf="lambd", trl="lam", loose="gae_lambda"),
    _row(
        "algorithm.clip_range_low algorithm.clip_range_high",
        "one for each side",
        verl=f"{_ACTOR}.clip_ratio",
        openrlhf="eps_clip eps_clip_low_high",
        trl="cliprange",
        loose="clip_range clip_ratio clip_eps",
    ),
    _row("algorithm.clip_range_low", verl=f"{_ACTOR}.clip_ratio_low", trl="epsilon", swift="epsilon"),
    _row(
        "algorithm.clip_range_high",
        verl=f"{_ACTOR}.clip_ratio_high",
        trl="epsilon_high",
        swift="epsilon_high",
    ),
    _row(
        "algorithm.dual_clip", verl=f"{_ACTOR}.clip_ratio_c", openrlhf="dual_clip", trl="delta", swift="delta"
    ),
    _row(
        "algorithm.value_clip_range",
        verl="critic.cliprange_value",
        openrlhf="value_clip",
        trl="cliprange_value",
        swift="cliprange_value",
    ),
    _row(
        "algorithm.loss_aggregation",
        verl=f"{_ACTOR}.loss_agg_mode",
        trl="loss_type",
        swift="loss_type",
    ),
    _row(
        "algorithm.normalize_group_std",
        verl="algorithm.norm_adv_by_std_in_grpo",
        openrlhf="no_advantage_std_norm",
        trl="scale_rewards",
        swift="scale_rewards",
    ),
    _row("algorithm.whiten_rewards", trl="whiten_rewards", swift="whiten_rewards"),
    _row(
        "algorithm.entropy_coef",
        verl=f"{_ACTOR}.entropy_coeff",
        openrlhf="entropy_loss_coef",
        loose="entropy_coeff ent_coef",
    ),
    _row(
        "algorithm.kl.coef",
        verl=f"algorithm.kl_ctrl.kl_coef {_ACTOR}.kl_loss_coef",
        openrlhf="init_kl_coef",
        trl="beta kl_coef",
        swift="beta",
        loose="kl_beta kl_loss_coef kl_penalty_coef",
    ),
    _row(
        "algorithm.kl.placement",
        "reward or loss",
        verl=f"algorithm.use_kl_in_reward {_ACTOR}.use_kl_loss",
        openrlhf="use_kl_loss",
        swift="kl_in_reward",
    ),
    _row(
        "algorithm.kl.estimator",
        verl=f"algorithm.kl_penalty {_ACTOR}.kl_loss_type",
        openrlhf="kl_estimator",
        trl="kl_estimator",
    ),
    _row("algorithm.kl.controller", verl="algorithm.kl_ctrl.type"),
    _row("algorithm.kl.target", verl="algorithm.kl_ctrl.target_kl", openrlhf="kl_target"),
    _row("algorithm.kl.horizon", verl="algorithm.kl_ctrl.horizon", openrlhf="kl_horizon"),
    _row("algorithm.shaping.normalize", openrlhf="normalize_reward"),
    _row("algorithm.shaping.clip", openrlhf="reward_clip_range"),
    _row("algorithm.shaping.missing_eos_penalty", trl="missing_eos_penalty", swift="missing_eos_penalty"),
    _row(
        "algorithm.shaping.overlong_buffer",
        verl="reward_model.overlong_buffer.len",
        openrlhf="overlong_buffer_len",
        swift="soft_cache_length",
    ),
    _row(
        "algorithm.shaping.overlong_penalty",
        verl="reward_model.overlong_buffer.penalty_factor",
        openrlhf="overlong_penalty_factor",
    ),
    _row(
        "algorithm.shaping.filter_groups",
        verl="algorithm.filter_groups.enable",
        openrlhf="dynamic_filtering",
        swift="dynamic_sample",
    ),
    _row(
        "algorithm.correction.level",
        openrlhf="enable_vllm_is_correction",
        trl="vllm_importance_sampling_correction vllm_importance_sampling_mode",
        swift="rollout_importance_sampling_mode",
    ),
    _row(
        "algorithm.correction.high",
        openrlhf="vllm_is_truncated_threshold",
        trl="vllm_importance_sampling_cap",
        swift="rollout_importance_sampling_threshold",
    ),
    # around it
    _row(
        "run_dir",
        verl="trainer.default_local_dir",
        openrlhf="save_path ckpt_path",
        trl="output_dir",
        swift="output_dir",
    ),
    _row(
        "name",
        verl="trainer.experiment_name",
        openrlhf="wandb_run_name",
        trl="run_name",
        swift="run_name",
    ),
    _row("tracking.wandb.project", verl="trainer.project_name", openrlhf="wandb_project", loose="project"),
    _row("tracking.wandb.entity", openrlhf="wandb_org"),
    _row("tracking.wandb.group", openrlhf="wandb_group"),
    _row(
        "tracking.wandb.mode",
        "or tracking=none",
        verl="trainer.logger",
        openrlhf="use_wandb",
        trl="report_to",
        swift="report_to",
    ),
    _row(
        "evaluate.every",
        "iterations",
        verl="trainer.test_freq",
        openrlhf="eval_steps",
        trl="eval_steps",
        swift="eval_steps",
    ),
    _row(
        "evaluate.samples_per_prompt",
        verl=f"{_ROLLOUT}.val_kwargs.n",
        openrlhf="eval_n_samples_per_prompt",
        trl="num_generations_eval",
    ),
    _row(
        "evaluate.temperature",
        verl=f"{_ROLLOUT}.val_kwargs.temperature",
        openrlhf="eval_temperature",
    ),
    _row(
        "update.keep_every",
        "every iteration is committed; this says which older ones are kept",
        verl="trainer.save_freq",
        openrlhf="save_steps",
        trl="save_steps",
        swift="save_steps",
    ),
    _row(
        "update.keep_last",
        verl="trainer.max_actor_ckpt_to_keep",
        openrlhf="max_ckpt_num",
        trl="save_total_limit",
        swift="save_total_limit",
    ),
    _row(
        "scheduler.update.gpus_per_node",
        "with scheduler=slurm, for each stage",
        verl="trainer.n_gpus_per_node",
        openrlhf="actor_num_gpus_per_node",
    ),
    _row(
        "scheduler.update.nodes",
        "with scheduler=slurm",
        verl="trainer.nnodes",
        openrlhf="actor_num_nodes",
    ),
)

OPTIONS = {
    "algorithm=gae": "algorithm=ppo",
    "algorithm=group_norm": "algorithm=grpo",
    "algorithm=drgrpo": "algorithm=dr_grpo",
    "algorithm=reinforce": "algorithm=reinforce_plus_plus",
    "algorithm=reinforce++": "algorithm=reinforce_plus_plus",
    "algorithm=reinforce_baseline": "algorithm=reinforce_plus_plus_baseline",
    "algorithm=reinforce++-baseline": "algorithm=reinforce_plus_plus_baseline",
    "algorithm=reinforce_plus_plus-baseline": "algorithm=reinforce_plus_plus_baseline",
    "rollout=hf": "rollout=transformers",
    "reward=function": "reward=rule",
    "update=deepspeed": "update=zero2",
    "tracking=w&b": "tracking=wandb",
}
"""Options of groups that others, or people, call otherwise, in lower case."""


def peer_words(key: str) -> PeerWords | None:
    """Return the row of a key as others have it: whole, or its last words. None for one that nobody has."""
    parts = key.lower().replace("-", "_").split(".")
    by_word = _by_word()
    endings = (".".join(parts[place:]) for place in range(len(parts)))
    return next((by_word[ending] for ending in endings if ending in by_word), None)


@cache
def _by_word() -> dict[str, PeerWords]:
    """Return rows by their words, and by the ends of words with dots, of two parts at least: people leave out
    where something lies."""
    found: dict[str, PeerWords] = {}
    for row in TABLE:
        for word in row.words:
            found.setdefault(word, row)
    for row in TABLE:
        for word in row.words:
            parts = word.split(".")
            for place in range(1, len(parts) - 1):
                found.setdefault(".".join(parts[place:]), row)
    return found
