"""Embedding tables on servers: how a gradient changes a row (ROW_RULES), and what a new row holds (ROW_INITS)."""

from shardline.seams import Table
from shardline.update.rows.inits import Normal, RowInit, Uniform, Zeros
from shardline.update.rows.rules import SGD, Adagrad, Adam, Ftrl, RowRule, RowwiseAdagrad

__all__ = ["ROW_INITS", "ROW_RULES", "RowInit", "RowRule"]

ROW_RULES: Table[RowRule] = Table("row rule", SGD, RowwiseAdagrad, Adagrad, Adam, Ftrl)

ROW_INITS: Table[RowInit] = Table("row init", Uniform, Normal, Zeros)
