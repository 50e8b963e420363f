"""Supervised tasks by configuration, and the small tools of a module that is written by hand."""

from unbroken.tasks.activation_checkpointing import recompute_activations as recompute_activations
from unbroken.tasks.classifier import ImageClassifier as ImageClassifier
from unbroken.tasks.classifier import take_mean_and_check_logits as take_mean_and_check_logits
from unbroken.tasks.optimizers import check_rates as check_rates
from unbroken.tasks.optimizers import make_optimizer as make_optimizer
from unbroken.tasks.optimizers import which_decay as which_decay
from unbroken.tasks.running_means import RunningMeans as RunningMeans
from unbroken.tasks.running_means import at_least_float32 as at_least_float32
from unbroken.tasks.running_means import is_right as is_right
from unbroken.tasks.running_sums import is_log_step as is_log_step
from unbroken.tasks.schedules import shaped_schedule as shaped_schedule
from unbroken.tasks.standardization import register_mean_and_std as register_mean_and_std
from unbroken.tasks.standardization import standardized as standardized
from unbroken.tasks.supervised import SupervisedModule as SupervisedModule
