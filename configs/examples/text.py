"""Text: a small BERT of Hugging Face, made from its configuration, tells praise from blame.

The texts are made up and nothing is downloaded. It imports and inherits nothing of this project.
"""

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

try:
    from transformers import BertConfig, BertForSequenceClassification
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}. Try: pip install transformers") from error

WORDS = ["not", "good", "great", "bad", "awful", "the", "film", "was", "and", "very"]
PRAISE = torch.tensor([0, 1, 1, -1, -1, 0, 0, 0, 0, 0])


class ReviewClassifier(L.LightningModule):
    """Sets the ``labels`` of texts. It logs a loss in nats, and the share of right answers, 0-1.

    ``BertForSequenceClassification.from_pretrained(name)`` would start from published weights.
    """

    def __init__(self, hidden_size: int = 32, layers: int = 2, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        size = {"hidden_size": hidden_size, "num_hidden_layers": layers, "num_attention_heads": 4}
        config = BertConfig(vocab_size=len(WORDS), intermediate_size=64, **size)
        self.bert = BertForSequenceClassification(config)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        words, labels = batch
        loss = self.bert(words, labels=labels).loss
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        words, labels = batch
        answers = self.bert(words).logits.argmax(dim=1)
        self.log("val_accuracy", (answers == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.lr)


class Reviews(L.LightningDataModule):
    """Texts as a tokenizer gives them: the numbers of eight words each, and a label."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(made_up(2000, seed=0), batch_size=50, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(made_up(500, seed=1), batch_size=50)


def made_up(count: int, seed: int) -> TensorDataset:
    """Random words. The label is 1 if they praise more than they blame; "not" turns the next."""
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(len(WORDS), (count, 8), generator=draw)
    praise = PRAISE[words]  # (count, 8)
    follows_not = words[:, :-1] == WORDS.index("not")
    praise[:, 1:][follows_not] *= -1
    return TensorDataset(words, (praise.sum(dim=1) > 0).long())
