"""Where metrics go: metrics.csv and W&B."""

# moved: delete these lines after the merge
from project.loggers.panels import PANELS as PANELS  # feature: report, dashboard
from project.loggers.panels import PARTS as PARTS  # feature: report, dashboard
from project.loggers.wandb_account import STEP as STEP  # feature: wandb
from project.loggers.wandb_account import wandb_state as wandb_state  # feature: wandb
