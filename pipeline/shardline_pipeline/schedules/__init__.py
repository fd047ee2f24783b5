"""Schedules of pipelines, one file each; shardline_pipeline lists them. Pure."""
