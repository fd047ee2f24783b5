"""The protocol without a network and without threads, under any interleaving that a seeded scheduler can think of.

    Model(Setup(seed=7, kills=10)).run()            # synchronous: PROTOCOL 1.4, 1.6, 1.7
    AsyncModel(AsyncSetup(seed=7)).run()            # asynchronous pushes: PROTOCOL 1.5

Every message, answer, death and command of the chief is one atomic action. The rules are the real ones
(shardline.consistency, shardline.core.reduce). What a schedule breaks is raised as Broken.
"""
