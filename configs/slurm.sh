#!/bin/bash
# One training over several machines under SLURM, one task per GPU; it survives preemption and the time limit.
#   sbatch configs/slurm.sh
#   sbatch --nodes 4 configs/slurm.sh --max_epochs 20 --precision bf16-mixed     # arguments of fit
# Preempted (SIGTERM): the job saves its step and ends; SLURM queues it again. Time limit near (SIGUSR1): the job saves
# its step and queues itself again. Both times it returns under its own id, and so to its own run and checkpoint.
#SBATCH --job-name=training
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --signal=SIGUSR1@90
#SBATCH --open-mode=append
#SBATCH --output=checkpoints/slurm-%j.log
set -euo pipefail

srun --kill-on-bad-exit=0 python -m project.fit --run_name "slurm-$SLURM_JOB_ID" --ckpt_path auto \
  --num_nodes "$SLURM_JOB_NUM_NODES" --devices "$((SLURM_NTASKS / SLURM_JOB_NUM_NODES))" --strategy ddp "$@"
