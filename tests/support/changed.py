"""Settings of a run that goes on: those that may change, and those that its results depend on."""

import shlex

_SLURM = """
scheduler.update.partition=long
scheduler.update.partition=[a,b]
scheduler.rollout.time=12:00:00
scheduler.reward.mem=64G
scheduler.update.cpus_per_task=4
scheduler.rollout.exclude=[n1,n2]
scheduler.rollout.constraint=a100
scheduler.reward.array_parallelism=2
scheduler.update.linger=600
scheduler.rollout.start_early=false
+scheduler.update.environment.NCCL_DEBUG=INFO
scheduler.reward.setup=["module load cuda"]
scheduler.account=other
scheduler.qos=high
+scheduler.options.comment=ppo
scheduler.max_attempts=7
scheduler.max_submitted=20
scheduler.check_minutes=5
scheduler.mail_type=[FAIL]
scheduler.driver.time=0:30:00
rollout.vllm.gpu_memory_utilization=0.7
reward.vllm.kv_cache_gib=4.0
tracking.wandb.mode=offline
tracking.wandb.samples_every=3
storage.purge_days=30
"""
_LOCAL = """
scheduler.max_attempts=5
scheduler.time_limit=60
scheduler.slots=3
scheduler.rollout.slots=1
scheduler.update.linger=5
update.keep_last=4
update.keep_shards_last=7
notify.command=[touch,told]
notify.on=[failed]
notify.stall_after=60
evaluate.command_attempts=4
"""
CHANGES = [
    *(("slurm", word) for word in _SLURM.split("\n") if word),
    *(("local", word) for word in _LOCAL.split("\n") if word),
]
"""Scheduler of a run, and a word that changes a setting of it while it goes on."""

_FROZEN = """
update.learning_rate=1e-4
update.critic_learning_rate=1e-4
update.epochs=1
update.minibatches=4
update.betas=[0.8,0.9]
update.epsilon=1e-6
update.weight_decay=0.1
update.max_grad_norm=2.0
update.warmup_steps=3
update.schedule=cosine
update.max_skipped_steps=5
update.tokens_per_micro_batch=256
update.num_threads=2
rollout.temperature=0.7
rollout.top_p=0.9
rollout.top_k=20
rollout.max_new_tokens=10
rollout.num_shards=4
rollout.tokens_per_batch=4096
rollout.num_threads=2
seed=7
iterations=5
data.shuffle=false
data.max_dropped=0.25
data.prompts_per_iteration=16
algorithm.gamma=0.99
algorithm.lam=0.9
algorithm.kl.coef=0.1
algorithm.clip_range_low=0.1
algorithm.entropy_coef=0.01
algorithm.target_kl=0.5
algorithm.whiten_advantages=false
evaluate.num_prompts=2
evaluate.solved_at=0.5
reward.components.rm.weight=2.0
tracking.wandb.project=other
scheduler.update.gpus=0
"""
REFUSED = [("local", word) for word in _FROZEN.split("\n") if word]
"""Scheduler of a run, and a word that only a fork can have."""


def fork_words(refusal: str) -> list[str]:
    """Words behind ``slurm-ppo`` of the fork that a refusal names; the third is the new run."""
    (line,) = (line for line in refusal.splitlines() if "slurm-ppo fork" in line)
    return shlex.split(line.partition(": slurm-ppo ")[2])
