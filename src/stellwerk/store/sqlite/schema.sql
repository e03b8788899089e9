-- The tables of schema version 1. Ids of runs rise with time, and so do EventIds: inserts append.

-- `added` is the EventId of RunAdded: unique, rising, and the key by which rows are updated and listed.
-- scope, name, queue and created_ms repeat what the spec says, for the indexes. result is a BodyRef as JSON.
CREATE TABLE runs (
    added        INTEGER PRIMARY KEY,
    id           TEXT NOT NULL UNIQUE,
    version      INTEGER NOT NULL CHECK (version >= 1),
    state        TEXT NOT NULL,
    queue        TEXT NOT NULL,
    scope        TEXT NOT NULL,
    name         TEXT NOT NULL,
    priority     INTEGER NOT NULL,
    created_ms   INTEGER NOT NULL,
    attempt      INTEGER NOT NULL DEFAULT 0,
    tries        INTEGER NOT NULL DEFAULT 0,
    crashes      INTEGER NOT NULL DEFAULT 0,
    due_ms       INTEGER,
    alarm_ms     INTEGER,
    live_key     TEXT,
    worker       TEXT,
    started_ms   INTEGER,
    ended_ms     INTEGER,
    reason       TEXT,
    error        TEXT,
    exit_code    INTEGER,
    waits_for    INTEGER NOT NULL DEFAULT 0,
    has_children INTEGER NOT NULL DEFAULT 0,
    stop_asked   INTEGER NOT NULL DEFAULT 0,
    result       TEXT,
    parked       TEXT,
    changed      INTEGER NOT NULL,
    spec         TEXT NOT NULL,
    -- Nobody would ever look at it again. Further checks of this kind cost 3 µs a run.
    CHECK (state <> 'running' OR alarm_ms IS NOT NULL)
) STRICT;

-- Claims walk this one; parked runs are not in it, so that a pause in front costs nothing.
CREATE INDEX runs_ready ON runs (queue, priority DESC, created_ms, id) WHERE state = 'ready' AND parked IS NULL;
CREATE INDEX runs_parked ON runs (parked, priority DESC, created_ms, id) WHERE parked IS NOT NULL;
CREATE INDEX runs_alarm ON runs (alarm_ms) WHERE alarm_ms IS NOT NULL;
CREATE UNIQUE INDEX runs_live ON runs (live_key) WHERE live_key IS NOT NULL;
CREATE INDEX runs_job ON runs (scope, name);
-- Lists by state. A run that is added ready, started and succeeds enters two of them.
CREATE INDEX runs_waiting ON runs (added) WHERE state = 'waiting';
CREATE INDEX runs_running ON runs (added) WHERE state = 'running';
CREATE INDEX runs_succeeded ON runs (added) WHERE state = 'succeeded';
CREATE INDEX runs_failed ON runs (added) WHERE state = 'failed';
CREATE INDEX runs_cancelled ON runs (added) WHERE state = 'cancelled';

-- run is the `added` of the run, here and in logs.
CREATE TABLE labels (
    key   TEXT NOT NULL,
    value TEXT NOT NULL,
    run   INTEGER NOT NULL,
    PRIMARY KEY (key, value, run)
) STRICT, WITHOUT ROWID;
CREATE INDEX labels_run ON labels (run);

CREATE TABLE bodies (
    run  TEXT NOT NULL,
    key  TEXT NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (run, key)
) STRICT, WITHOUT ROWID;

CREATE TABLE edges (
    parent TEXT NOT NULL,
    child  TEXT NOT NULL,
    "when" TEXT NOT NULL,
    PRIMARY KEY (parent, child)
) STRICT, WITHOUT ROWID;
CREATE INDEX edges_child ON edges (child);

CREATE TABLE records (
    kind     TEXT NOT NULL,
    key      TEXT NOT NULL,
    version  INTEGER NOT NULL,
    tag      TEXT NOT NULL,
    alarm_ms INTEGER,
    added    INTEGER NOT NULL,
    body     BLOB NOT NULL,
    PRIMARY KEY (kind, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX records_alarm ON records (alarm_ms) WHERE alarm_ms IS NOT NULL;

-- Few; the writer keeps them all in memory. body is the gate as JSON.
CREATE TABLE gates (
    key      TEXT NOT NULL,
    kind     TEXT NOT NULL,
    until_ms INTEGER,
    body     TEXT NOT NULL,
    PRIMARY KEY (key, kind)
) STRICT, WITHOUT ROWID;

-- One row per call: events last_id - count + 1 … last_id as one msgpack list. position counts all events ever.
CREATE TABLE journal (
    last_id  INTEGER PRIMARY KEY,
    count    INTEGER NOT NULL,
    position INTEGER NOT NULL,
    body     BLOB NOT NULL
) STRICT;

CREATE TABLE counters (
    queue TEXT NOT NULL,
    state TEXT NOT NULL,
    n     INTEGER NOT NULL,
    PRIMARY KEY (queue, state)
) STRICT, WITHOUT ROWID;

-- One row per chunk, lines as one msgpack list, in the order of reading.
CREATE TABLE logs (
    run       INTEGER NOT NULL,
    last_line INTEGER NOT NULL,
    attempt   INTEGER NOT NULL,
    sequence  INTEGER NOT NULL,
    count     INTEGER NOT NULL,
    body      BLOB NOT NULL,
    PRIMARY KEY (run, last_line, attempt, sequence)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX logs_taken ON logs (run, attempt, sequence);

-- schema, epoch, and the last EventId that was forgotten.
CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT, WITHOUT ROWID;
