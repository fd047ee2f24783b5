"""Schedules of pipelines, one file each; shardline.pipeline lists them. Pure."""
