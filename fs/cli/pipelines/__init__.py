"""The commands of `aof2 spark`: one file a pipeline, which reads its options into the `Arguments` of the engine's
module of the same name and hands them to `launch`.

    @click.command(epilog="Example: aof2 spark NAME …")
    @click.argument(…)
    @pipeline_options
    def NAME(…, **how) -> None:
        from aof2.engine.spark.pipelines import NAME as pipeline

        launch(pipeline, pipeline.Arguments(…), **how)

launch.py    the session: started, its noise kept in a file, stopped; progress, summary, exit code
causes.py    one line out of what Spark says when a job fails
"""
