"""Embedding tables on servers: how a gradient changes a row, what a new row holds, which ids get and keep one."""

from shardline.seams import Table
from shardline.update.rows.inits import Normal, RowInit, Uniform, Zeros
from shardline.update.rows.rules import SGD, Adagrad, Adam, Ftrl, RowRule, RowwiseAdagrad
from shardline.update.rows.turnover import Admission, After, Age, Always, Eviction, Never, Norm, Probability

__all__ = ["ROW_ADMISSIONS", "ROW_EVICTIONS", "ROW_INITS", "ROW_RULES", "Admission", "Eviction", "RowInit", "RowRule"]

ROW_RULES: Table[RowRule] = Table("row rule", SGD, RowwiseAdagrad, Adagrad, Adam, Ftrl)

ROW_INITS: Table[RowInit] = Table("row init", Uniform, Normal, Zeros)

ROW_ADMISSIONS: Table[Admission] = Table("row admission", Always, After, Probability)

ROW_EVICTIONS: Table[Eviction] = Table("row eviction", Never, Age, Norm)
