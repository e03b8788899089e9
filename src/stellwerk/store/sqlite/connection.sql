-- Transactions, settings of a connection, and what is done once at a start.

-- name: end_leases
-- At an exclusive start nobody holds a lease: all are due for a look at once.
UPDATE runs SET alarm_ms = 1 WHERE added IN (SELECT added FROM runs WHERE state = 'running')

-- name: hope
-- From here on a call may be undone, without what came before it in the same transaction.
SAVEPOINT hope

-- name: give_up_hope
-- Undo the call.
ROLLBACK TO hope

-- name: end_of_hope
-- What was done since, if it was not undone, belongs to the transaction.
RELEASE hope

-- name: begin_writing
-- One writer, so it never waits for another.
BEGIN IMMEDIATE

-- name: begin_reading
-- One moment for all that is read.
BEGIN

-- name: commit
-- And flush.
COMMIT

-- name: roll_back
-- End of a reading, or of a writing that failed.
ROLLBACK

-- name: checkpoint
-- Copy the WAL into the file and start it afresh.
PRAGMA wal_checkpoint(TRUNCATE)

-- name: vacuum
-- Give some free pages back to the file system: 512 pages are 2 MiB.
PRAGMA incremental_vacuum(512)

-- name: synchronous
-- How this connection flushes: 2 is FULL.
PRAGMA synchronous

-- name: count_tables
-- An empty file has none.
SELECT count(*) FROM sqlite_schema

-- name: new_file
-- What can only be said before the first table: pages that become free can be given back in bounded steps.
PRAGMA auto_vacuum = INCREMENTAL

-- name: known_file
-- A file that has tables keeps what it was made with.
PRAGMA auto_vacuum

-- name: any_connection
-- A backup tool may hold the file for a moment; 64 MiB of pages; freed pages need not be overwritten.
PRAGMA busy_timeout = 5000;
PRAGMA cache_size = -65536;
PRAGMA temp_store = MEMORY;
PRAGMA secure_delete = OFF

-- name: writing_connection
-- Acknowledged is flushed. The WAL is copied back every 4 MiB, and shrinks to 16 MiB after a burst.
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
PRAGMA wal_autocheckpoint = 1000;
PRAGMA journal_size_limit = 16777216

-- name: reading_connection
-- Belt and braces: the file is opened for reading only.
PRAGMA query_only = ON
