#!/bin/bash
# The head of the job script. bsearch adds the lines for what the study file says (nodes, cores, GPUs), for the log and
# for the job's name; add your cluster's, such as
#   #SBATCH --partition=gpu
#   #SBATCH --time=8:00:00
#SBATCH --requeue

export PATH={{ programs }}:$PATH # the Python that submits; or: module load cuda/12.4; source ~/venv/bin/activate
requeues=20 # how many times the job may requeue itself when it reaches its time limit before the study is done
{{ command }}
