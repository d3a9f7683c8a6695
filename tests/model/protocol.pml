/* The protocol of one job with one effect: two workers, of which any may stand still and come back as a zombie, a
 * sweeper, a reconciler, an operator who may cancel, a clock, and a provider with or without keys and look-ups. Crashes,
 * lost answers and leases that run out happen anywhere, TROUBLE times.
 *
 * A transition that stands for a statement of the store names it after "SQL:"; docs/model.md has the table. What a
 * statement asks for is a macro G_...; -DNO_<GUARD> takes one away, and then something below must not hold. KEY and
 * LOOKUP say what the provider can do. tests/model/test_model.py runs all of this.
 */

#ifndef KEY
#define KEY 0
#endif
#ifndef LOOKUP
#define LOOKUP 1
#endif
#ifndef TROUBLE
#define TROUBLE 3
#endif

#define RUNS 2                  /* that the job may have, at first */
#define F 9                     /* more fences than there can be */
#define NOBODY 2

mtype = { queued, running, parked, succeeded, failed, cancelled };
mtype = { none, open, unknown, confirmed, absent };
mtype = { idle, claimed, intended, calling, answered, dead };

/* What stands in the database. */
mtype job = queued;
mtype op = none;
byte fence = 0;                 /* of the last claim */
byte owner = NOBODY;            /* whose token the row carries */
byte runs = RUNS;
bool live = false;              /* the lease has not run out, by the database's clock */
byte attempt = 0;               /* the claim whose call the operation is: its nonce */
bool past = false;              /* deadline and lag of that call are over, by the database's clock */
bool gone = false;              /* its sender was seen to be no more */
bool inDoubt = false;           /* it was sent again, and what became of the call before is not known */
bool notFound = false;          /* a look-up, asked late enough, found nothing */
bool retained = true;           /* the first intent is so young that a whole call fits into the key's life */
bool cancel = false;

/* What is outside. */
byte trouble = TROUBLE;
byte happened = 0;              /* effects in the provider's ledger */
bool forgot = false;            /* the provider has forgotten the key */
bool flying[F];                 /* the request of that claim may still arrive */
bool arrived[F];
bool died[F];                   /* the process that had that claim is no more */

/* What workers remember. */
mtype at[2] = idle;
byte mine[2];

/* The statements' guards. */
#ifdef NO_CLAIM_QUEUED
#define G_CLAIM_QUEUED (job == queued || job == running)
#else
#define G_CLAIM_QUEUED (job == queued)
#endif
#ifdef NO_INTENT_FENCE
#define G_INTENT_FENCE (job == running)
#else
#define G_INTENT_FENCE (job == running && owner == w && fence == mine[w])
#endif
#ifdef NO_INTENT_LIVE
#define G_INTENT_LIVE true
#else
#define G_INTENT_LIVE live
#endif
#ifdef NO_INTENT_CANCEL
#define G_INTENT_CANCEL true
#else
#define G_INTENT_CANCEL (!cancel)
#endif
#ifdef NO_INTENT_ONCE
#define G_INTENT_ONCE (op != confirmed)
#else
#define G_INTENT_ONCE (op == none || op == absent || (op == unknown && SENDABLE))
#endif
#ifdef NO_RETAINED
#define G_RETAINED true
#else
#define G_RETAINED retained
#endif
#define SENDABLE (KEY && G_RETAINED && (gone || past) && (!LOOKUP || notFound))
#ifdef NO_SEND_IN_TIME
#define G_SEND_IN_TIME true
#else
#define G_SEND_IN_TIME (attempt == mine[w] && !past && live && fence == mine[w])
#endif
#ifdef NO_NONCE
#define G_NONCE true
#else
#define G_NONCE (attempt == mine[w])
#endif
#ifdef NO_END_FENCE
#define G_END_FENCE (job == running)
#else
#define G_END_FENCE (job == running && owner == w && fence == mine[w])
#endif
#ifdef NO_PARK
#define G_PARK false
#else
#define G_PARK (op == open || op == unknown)
#endif
#ifdef NO_SWEEP_OVER
#define G_SWEEP_OVER true
#else
#define G_SWEEP_OVER (!live)
#endif
#ifdef NO_GONE_SEEN
#define G_GONE_SEEN true
#else
#define G_GONE_SEEN died[attempt]
#endif
#ifdef NO_GONE_LATE
#define G_GONE_LATE skip
#else
#define G_GONE_LATE past = past && KEY      /* it may have sent until now: deadline and lag begin anew */
#endif
#ifdef NO_VERDICT_GONE
#define G_VERDICT_GONE true
#else
#ifdef NO_VERDICT_GONE_BEFORE
#define G_VERDICT_GONE gone
#else
#define G_VERDICT_GONE wasGone
#endif
#endif
#ifdef NO_IN_DOUBT
#define G_IN_DOUBT false
#else
#define G_IN_DOUBT inDoubt
#endif
#ifdef NO_VERDICT_LATE
#define G_VERDICT_LATE true
#else
#define G_VERDICT_LATE late
#endif
#ifdef NO_VERDICT_ATTEMPT
#define G_VERDICT_ATTEMPT true
#else
#define G_VERDICT_ATTEMPT (asked == attempt)
#endif

#define ENDED (job == succeeded || job == failed || job == cancelled)

inline always() {
    assert(happened <= 1);                                                      /* 4: no effect twice */
    assert(!ENDED || (op != open && op != unknown));                            /* 5, 6: no end with an open question */
    assert(job != succeeded || op == confirmed);                                /* 5 */
    assert(happened == 0 || op == open || op == unknown || op == confirmed);    /* 3, 14: it stands in the record */
    assert(op != confirmed || happened == 1);
    assert(op != open || job == running)                                        /* the lease over: unknown */
}

/* leaves_to(), and the trigger that runs when a lease is over. */
inline leaves() {
    live = false; owner = NOBODY;
    if
    :: G_PARK -> job = parked
    :: else ->
        if
        :: op == confirmed && wish -> job = succeeded
        :: !(op == confirmed && wish) && cancel -> job = cancelled
        :: !(op == confirmed && wish) && !cancel && fence >= runs -> job = failed
        :: else -> job = queued
        fi
    fi;
    if
    :: op == open -> op = unknown
    :: else
    fi
}

/* operation_after(): a parked job whose question is answered moves on, and may finish its replay. */
inline resolved() {
    if
    :: job == parked && cancel -> job = cancelled
    :: job == parked && !cancel -> job = queued; runs++
    :: else
    fi
}

proctype worker(bit w) {
    bool wish;
end:
    do
    /* SQL: CLAIM */
    :: d_step { at[w] == idle && G_CLAIM_QUEUED && !cancel && fence < runs ->
        assert(owner == NOBODY);                                                /* 2: a live run is nobody else's */
        fence++; mine[w] = fence; owner = w; live = true; job = running; at[w] = claimed; always() }

    /* SQL: INTENT */
    :: d_step { at[w] == claimed && op != confirmed ->
        if
        :: G_INTENT_FENCE && G_INTENT_LIVE && G_INTENT_CANCEL && G_INTENT_ONCE ->
            assert(owner == w && fence == mine[w] && live && !cancel);          /* 3 */
            inDoubt = (op == unknown);
            op = open; attempt = mine[w]; past = false; gone = false; notFound = false; at[w] = intended
        :: else -> at[w] = answered
        fi; always() }

    /* The replay gives the recorded outcome. SQL: RECORDED */
    :: d_step { at[w] == claimed && op == confirmed -> at[w] = answered }

    /* The request goes out; or its owner can prove that it did not begin. SQL: OUTCOME */
    :: d_step { at[w] == intended ->
        if
        :: G_SEND_IN_TIME -> flying[mine[w]] = true; at[w] = calling
        :: else ->
            if
            :: (op == open || op == unknown) && G_NONCE && !(G_IN_DOUBT) -> op = absent; resolved()
            :: op == open && G_NONCE && G_IN_DOUBT -> op = unknown
            :: else
            fi; at[w] = answered
        fi; always() }

    /* The answer is recorded, also by a worker that was fenced out. SQL: OUTCOME_ASYNC */
    :: d_step { at[w] == calling && arrived[mine[w]] ->
        if
        :: (op == open || op == unknown || op == absent) && G_NONCE -> op = confirmed; resolved()
        :: else                                                                 /* otherwise it is evidence: SQL: LATE_OUTCOME */
        fi; at[w] = answered; always() }

    /* No answer is heard, or nothing arrived in time. SQL: OUTCOME */
    :: d_step { at[w] == calling && (trouble > 0 || (!flying[mine[w]] && !arrived[mine[w]])) ->
        if
        :: flying[mine[w]] || arrived[mine[w]] -> trouble--
        :: else
        fi;
        if
        :: op == open && G_NONCE -> op = unknown
        :: else
        fi; at[w] = answered; always() }

    /* SQL: LEAVE */
    :: d_step { at[w] == answered ->
        wish = true;
        if
        :: G_END_FENCE -> assert(owner == w && fence == mine[w]); leaves()      /* 2 */
        :: else
        fi; wish = false; at[w] = idle; always() }

    /* A crash, anywhere; what is under way may still arrive. Another process takes its place. */
    :: d_step { trouble > 0 && at[w] != dead && at[w] != idle ->
        trouble--; died[mine[w]] = true; at[w] = dead;
        if
        :: KEY && past && attempt == mine[w] -> flying[mine[w]] = false         /* the kernel ended it at its deadline */
        :: else
        fi }
    :: d_step { at[w] == dead -> at[w] = idle }
    od
}

proctype sweeper() {
    bool wish;
end:
    do
#ifndef NO_SWEEPER
    /* SQL: SWEEP_LEASES */
    :: d_step { job == running && G_SWEEP_OVER -> assert(!live); leaves(); always() }
#endif
    /* SQL: GONE */
    :: d_step { op == unknown && !gone && G_GONE_SEEN -> gone = true; G_GONE_LATE }
    od
}

proctype reconciler() {
    byte asked; bool late; bool wasGone; bool found;
end:
    do
    /* The provider is asked, and answers; what it said is written down later. SQL: RECONCILE_DUE */
    :: d_step { LOOKUP && op == unknown && (happened > 0 || past) ->
            asked = attempt; late = past; wasGone = gone; found = (happened > 0) }
        d_step {
            if
            /* SQL: VERDICT */
            :: op == unknown && G_VERDICT_ATTEMPT && found -> op = confirmed; resolved()
            :: op == unknown && G_VERDICT_ATTEMPT && !found && G_VERDICT_LATE && G_VERDICT_GONE ->
                op = absent; resolved()
            /* SQL: ABSENT */
            :: op == unknown && G_VERDICT_ATTEMPT && !found && late && !(G_VERDICT_GONE) -> notFound = true
            :: else
            fi; asked = 0; late = false; wasGone = false; found = false; always() }
#ifdef NO_VERDICT_LATE
    :: d_step { LOOKUP && op == unknown && !past && happened == 0 -> asked = attempt; late = false; wasGone = gone; found = false }
        d_step {
            if
            :: op == unknown && G_VERDICT_ATTEMPT && G_VERDICT_GONE -> op = absent; resolved()
            :: else
            fi; asked = 0; wasGone = false; always() }
#endif
    /* SQL: RESUME */
    :: d_step { job == parked && op == unknown && SENDABLE && !cancel -> job = queued; runs++; always() }
    od
}

proctype operator() {
end:
    /* SQL: CANCEL */
    d_step { !cancel && !ENDED ->
        cancel = true;
        if
        :: job == queued && op != unknown -> job = cancelled
        :: job == queued && op == unknown -> job = parked
        :: job == parked && op != unknown -> job = cancelled
        :: else
        fi; always() }
}

inline arrives(f) {
    flying[f] = false; arrived[f] = true;
    if
    :: KEY && happened > 0 && !forgot                                           /* the first answer once more */
    :: else -> happened++
    fi; always()
}

proctype provider() {
end:
    do
    :: d_step { flying[1] -> arrives(1) }
    :: d_step { flying[2] -> arrives(2) }
    :: d_step { flying[3] -> arrives(3) }
    :: d_step { flying[4] -> arrives(4) }
    :: d_step { flying[5] -> arrives(5) }
    :: d_step { flying[6] -> arrives(6) }
    :: d_step { flying[7] -> arrives(7) }
    :: d_step { flying[8] -> arrives(8) }
    od
}

proctype clock() {
    byte f; bool any;
end:
    do
    /* A lease runs out: its worker stood still, or cannot reach the database. RENEW would not revive it. */
    :: d_step { live && (trouble > 0 || died[fence]) ->
        if
        :: !died[fence] -> trouble--
        :: else
        fi; live = false }
    /* The deadline: nothing of a dead sender arrives any more; where keys are relied upon, nothing at all. */
    :: d_step { (op == unknown || (op == open && trouble > 0)) && !past ->
        if
        :: op == open -> trouble--
        :: else
        fi;
        past = true; f = 0;
        do
        :: f < F && flying[f] && (KEY || died[f]) -> flying[f] = false; f++
        :: f < F && !(flying[f] && (KEY || died[f])) -> f++
        :: f == F -> break
        od; f = 0 }
    :: d_step { KEY && retained && attempt > 0 -> retained = false }
    /* By the resend rule the key outlives the deadline of each call. */
    :: d_step { KEY && !retained && !forgot && (past || (op != open && op != unknown)) ->
        f = 0; any = false;
        do
        :: f < F && flying[f] -> any = true; f++
        :: f < F && !flying[f] -> f++
        :: f == F -> break
        od; f = 0;
        if
        :: !any -> forgot = true
        :: else
        fi; any = false }
    od
}

#ifdef ENDS
/* Time goes on where nothing else can: a standstill is a history without end, too. */
bit tick;
active proctype goes_on() {
    do
    :: tick = 1 - tick
    od
}
#endif

init {
    atomic { run worker(0); run worker(1); run sweeper(); run reconciler();
#if RECONCILERS > 1
        run reconciler();
#endif
        run operator(); run provider(); run clock() }
}

/* 8: accepted work ends: it is over, or parked with a question that is open. */
ltl ends { <> [] (ENDED || (job == parked && op == unknown)) }
