"""What a harness leaves: calls become a tree, the tree gets roles and a score, is sampled within a bound and
packed into micro-steps, which a queue hands to training cells. Cores are plain functions on numpy arrays;
actors and the journal (SQLite) around them make what was acknowledged durable."""
