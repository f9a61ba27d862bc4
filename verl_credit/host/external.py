"""Imported by verl in every process that builds the model config (``model.external_lib``)."""

from verl_credit.host.process.register import register_all

register_all()
