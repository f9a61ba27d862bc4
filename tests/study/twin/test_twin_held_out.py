"""The twin is tested on the questions that verl's data set would choose."""

from omegaconf import OmegaConf
from verl.utils.dataset.rl_dataset import RLHFDataset

from verl_credit.study.twin import held_out


class Rows(list):
    def select(self, indices):
        return Rows(self[i] for i in indices)


def of_verl(total, most, seed, monkeypatch):
    """The choice of verl's own class, on row numbers in place of a file."""
    data = RLHFDataset.__new__(RLHFDataset)
    data.data_files, data.max_samples, data.shuffle, data.seed = ["rows.parquet"], most, True, seed
    data.config = OmegaConf.create({})
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: {"train": Rows(range(total))})
    monkeypatch.setattr("datasets.concatenate_datasets", lambda parts: parts[0])
    monkeypatch.setattr(data, "maybe_filter_out_long_prompts", lambda rows: rows)
    data._read_files_and_tokenize()
    return list(data.dataframe)


def test_the_choice_is_verls(monkeypatch):
    for total, most, seed in ((512, 256, 1), (512, 256, 7), (10, -1, 1), (10, 20, 1)):
        assert held_out(total, most, seed) == of_verl(total, most, seed, monkeypatch)
