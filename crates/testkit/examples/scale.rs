//! Simulates a cluster whose nodes read from an object store: what `docs/scale.md` says of it comes from here.
//!
//! ```text
//! cargo run --release -p aquifer-testkit --example scale -- [NAME=VALUE,…]…
//! ```
//! Prints one row for each combination of the values, as a table. The test in this file runs the commands in
//! `docs/scale.md` and compares their tables with those below them. The same arguments print the same table on every
//! machine: only operations whose results IEEE 754 fixes are used.
//!
//! # What is modelled
//! * A *process* computes for `compute`, then asks for a batch of `batch` reads, and waits for all of them.
//! * Of a batch, what its node has in its tier and its memory is served there: each read that memory lacks takes the SSD
//!   `1/iops`, or the time of its bytes at `ssd` if that is longer, shared by the processes of the node. A random
//!   read misses with the share of `data` that the node lacks. With `passes=1` the processes of a node pass over `data`
//!   together, again and again: each read misses in the first pass, and in the later ones too if the tier is smaller than
//!   `data` (CLOCK, as LRU, then keeps nothing of use).
//! * Each miss is one request of `request` bytes. A process has at most `in_flight` of them under way, those that wait for
//!   a retry included.
//! * The store answers `gets` requests a second for each of `prefixes`, with a burst of one second, and refuses the
//!   others (503). Keys are spread evenly over prefixes. A refused request is sent again after 100 ms, then between that
//!   and twice the last wait, at most 15 s, and given up after `retries` or 30 s: the read has failed then, and the
//!   batch goes on without it.
//! * With `adaptive=1`, a process halves its requests in flight when one is refused, and adds one for as many answers as
//!   are in flight (additive increase, multiplicative decrease: V. Jacobson, "Congestion Avoidance and Control", 1988).
//! * A headers' latency is uniform between half and one and a half of `latency`, five times that for one in a hundred.
//!   Bodies pass the node's `link` and the `store`'s connection one after another, and their own connection at
//!   `connection`.
//! * All nodes start within `stagger`, with the share `warm` of their tier filled.
//!
//! Not modelled: failures of nodes, peers that help each other, and stores that add capacity while they are under load.

use std::fmt::Write as _;

use aquifer_testkit::rng::Rng;

/// Milliseconds.
type Time = u64;

const SECOND: Time = 1000;
const GIVE_UP: Time = 30 * SECOND;
const FIRST_WAIT: Time = 100;
const LONGEST_WAIT: Time = 15 * SECOND;
/// Requests that the simulation treats alike, to be quick.
const TOGETHER: u32 = 16;
/// US dollars for a million GET requests of S3's standard class.
const PRICE_PER_MILLION: f64 = 0.4;

macro_rules! arguments {
    ($($name:ident = $default:literal, $about:literal;)*) => {
        /// Name, default, and what it is.
        const ARGUMENTS: &[(&str, &str, &str)] = &[$((stringify!($name), $default, $about)),*];

        /// The value of each argument.
        #[derive(Clone)]
        struct Cluster {
            $($name: f64,)*
        }

        impl Cluster {
            fn new() -> Cluster {
                Cluster { $($name: value($default).expect("a number"),)* }
            }

            fn set(&mut self, name: &str, text: &str) -> Option<()> {
                match name {
                    $(stringify!($name) => self.$name = value(text)?,)*
                    _ => return None,
                }
                Some(())
            }
        }
    };
}

arguments! {
    nodes = "1000", "nodes";
    processes = "4", "processes on each";
    passes = "0", "1: sequential passes; 0: random reads";
    data = "4T", "bytes that one node reads from";
    batch = "256", "reads of a batch";
    read = "3K", "bytes of a read";
    request = "8K", "bytes of the request for one that misses";
    compute = "100", "milliseconds between batches";
    in_flight = "64", "requests of a process at once";
    tier = "1T", "bytes of a node's SSD tier";
    memory = "64G", "bytes of a node's memory for data";
    iops = "200000", "reads of a node's SSD in a second";
    ssd = "6G", "bytes of a node's SSD in a second";
    warm = "0", "share of the tier that is filled at the start";
    stagger = "0", "milliseconds within which the nodes start";
    prefixes = "1", "prefixes over which the keys are spread";
    gets = "5500", "requests that a prefix serves in a second";
    latency = "30", "milliseconds to the headers";
    link = "3G", "bytes a node receives in a second";
    connection = "90M", "bytes a connection receives in a second";
    store = "100T", "bytes the store sends in a second";
    retries = "10", "retries of a refused request";
    adaptive = "0", "1: refusals reduce the requests in flight";
    seconds = "20", "that are simulated";
    seed = "1", "of the random numbers";
}

/// A number, with K, M, G, T for powers of 1024.
fn value(text: &str) -> Option<f64> {
    let digits = text.trim_end_matches(['K', 'M', 'G', 'T']);
    let power = match &text[digits.len()..] {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return None,
    };
    Some(digits.parse::<f64>().ok()? * (1u64 << power) as f64)
}

/// What happens to a process.
#[derive(Clone, Copy)]
enum Event {
    /// It has computed.
    Asks,
    /// This many requests are answered.
    Answered(u32),
    /// This many are sent again: how often before, first at this time, and after what wait.
    Resent { requests: u32, attempts: u32, first: Time, waited: Time },
}

#[derive(Clone, Default)]
struct Process {
    asked: Time,
    unsent: u32,
    /// Of the batch, without an answer.
    left: u32,
    /// Sent, or waiting to be sent again.
    under_way: u32,
    /// What the batch then takes of the SSD.
    local: Time,
    /// Most requests under way; changes only if adaptive.
    window: f64,
}

#[derive(Clone, Default)]
struct Node {
    /// Bytes of its data that it has.
    held: f64,
    /// Bytes passed over, in sequential passes.
    passed: f64,
    /// When its link is free, in milliseconds.
    link_free: f64,
}

struct Found {
    batches: u64,
    waits: Vec<Time>,
    answered: u64,
    refused: u64,
    failed: u64,
    held: f64,
}

/// Sends that compete for the store within one millisecond.
struct Sent {
    process: usize,
    requests: u32,
    attempts: u32,
    first: Time,
    waited: Time,
}

struct Simulation {
    cluster: Cluster,
    rng: Rng,
    nodes: Vec<Node>,
    processes: Vec<Process>,
    calendar: Vec<Vec<(usize, Event)>>,
    sent: Vec<Sent>,
    store_free: f64,
    found: Found,
}

impl Simulation {
    fn run(cluster: &Cluster) -> Found {
        let end = (cluster.seconds * 1000.0) as Time;
        let held = cluster.tier.min(cluster.data) * cluster.warm;
        let (nodes, on_each) = (cluster.nodes as usize, cluster.processes as usize);
        let idle = Process { window: cluster.in_flight, ..Process::default() };
        let mut simulation = Simulation {
            cluster: cluster.clone(),
            rng: Rng::new(cluster.seed as u64),
            nodes: vec![Node { held, ..Node::default() }; nodes],
            processes: vec![idle; nodes * on_each],
            calendar: vec![vec![]; end as usize],
            sent: vec![],
            store_free: 0.0,
            found: Found {
                batches: 0,
                waits: vec![],
                answered: 0,
                refused: 0,
                failed: 0,
                held: 0.0,
            },
        };
        let spread = cluster.stagger as u64 + cluster.compute as u64 + 1;
        for process in 0..simulation.processes.len() {
            let at = simulation.rng.below(spread);
            simulation.at(at, process, Event::Asks);
        }
        let capacity = cluster.prefixes * cluster.gets;
        let mut tokens = capacity;
        for now in 0..end {
            for (process, event) in std::mem::take(&mut simulation.calendar[now as usize]) {
                simulation.happen(now, process, event);
            }
            tokens = (tokens + capacity / 1000.0).min(capacity);
            tokens -= simulation.serve(now, tokens);
        }
        let capacity: f64 = cluster.tier.min(cluster.data).max(1.0) * nodes as f64;
        simulation.found.held =
            simulation.nodes.iter().map(|node| node.held).sum::<f64>() / capacity;
        simulation.found
    }

    fn at(&mut self, time: Time, process: usize, event: Event) {
        if let Some(events) = self.calendar.get_mut(time as usize) {
            events.push((process, event));
        }
    }

    fn happen(&mut self, now: Time, number: usize, event: Event) {
        match event {
            Event::Asks => {
                let (misses, local) = self.draw(number);
                let process = &mut self.processes[number];
                (process.asked, process.unsent, process.left) = (now, misses, misses);
                process.local = local;
                self.send(now, number);
            }
            Event::Answered(requests) => {
                let most = self.cluster.in_flight;
                let process = &mut self.processes[number];
                process.window = (process.window + f64::from(requests) / process.window).min(most);
                process.under_way -= requests;
                process.left -= requests;
                self.send(now, number);
            }
            Event::Resent { requests, attempts, first, waited } => {
                self.sent.push(Sent { process: number, requests, attempts, first, waited });
            }
        }
    }

    /// How many reads of a batch miss, and how long the others take.
    fn draw(&mut self, number: usize) -> (u32, Time) {
        let cluster = &self.cluster;
        let (data, tier) = (cluster.data, cluster.tier);
        let (batch, request) = (cluster.batch, cluster.request);
        let node = &mut self.nodes[number / cluster.processes as usize];
        let misses = if cluster.passes > 0.0 {
            let is_held =
                node.passed >= data && tier >= data || node.passed + batch * request <= node.held;
            node.passed += batch * request;
            if is_held { 0.0 } else { batch }
        } else {
            let share = 1.0 - node.held / data;
            // Twelve uniform numbers: nearly a normal one.
            let normal: f64 = (0..12).map(|_| self.rng.unit_f64()).sum::<f64>() - 6.0;
            (batch * share + normal * (batch * share * (1.0 - share)).sqrt() + 0.5)
                .floor()
                .clamp(0.0, batch)
        };
        // Misses of other processes meanwhile are seldom the same.
        node.held = (node.held + misses * request).min(tier).min(data);
        let in_memory = (cluster.memory / node.held.max(1.0)).min(1.0);
        let from_ssd = (batch - misses) * (1.0 - in_memory) * cluster.processes;
        let of_one = (1.0 / cluster.iops).max(cluster.read / cluster.ssd);
        let local = from_ssd * of_one * 1000.0;
        (misses as u32, local as Time)
    }

    /// Sends what may be under way, or ends the batch.
    fn send(&mut self, now: Time, number: usize) {
        let process = &mut self.processes[number];
        if process.left == 0 {
            let end = now + process.local;
            self.found.batches += 1;
            self.found.waits.push(end - process.asked);
            let next = end + self.cluster.compute as Time;
            return self.at(next.max(now + 1), number, Event::Asks);
        }
        let free = (process.window as u32).max(1).saturating_sub(process.under_way);
        let mut requests = process.unsent.min(free);
        process.unsent -= requests;
        process.under_way += requests;
        while requests > 0 {
            let some = requests.min(TOGETHER);
            requests -= some;
            self.sent.push(Sent {
                process: number,
                requests: some,
                attempts: 0,
                first: now,
                waited: FIRST_WAIT,
            });
        }
    }

    /// Serves what was sent now, as far as there are `tokens`; returns how many it took.
    fn serve(&mut self, now: Time, tokens: f64) -> f64 {
        let sent = std::mem::take(&mut self.sent);
        let wanted: u32 = sent.iter().map(|one| one.requests).sum();
        let share = (tokens / f64::from(wanted.max(1))).min(1.0);
        let mut served = 0.0;
        for one in sent {
            let exact = f64::from(one.requests) * share + self.rng.unit_f64();
            let some = (exact as u32).min(one.requests).min((tokens - served) as u32);
            served += f64::from(some);
            if some > 0 {
                let end = self.transfer(now, one.process, some);
                self.found.answered += u64::from(some);
                self.at(end, one.process, Event::Answered(some));
            }
            if some < one.requests {
                self.refuse(now, Sent { requests: one.requests - some, ..one });
            }
        }
        served
    }

    /// When the bodies of these requests have arrived.
    fn transfer(&mut self, now: Time, number: usize, requests: u32) -> Time {
        let cluster = &self.cluster;
        let request = cluster.request;
        let mut latency = cluster.latency * (0.5 + self.rng.unit_f64());
        if self.rng.chance(0.01) {
            latency *= 5.0;
        }
        let bytes = f64::from(requests) * request;
        let node = &mut self.nodes[number / cluster.processes as usize];
        let now = now as f64;
        self.store_free = self.store_free.max(now) + bytes / cluster.store * 1000.0;
        node.link_free = node.link_free.max(now) + bytes / cluster.link * 1000.0;
        let alone = now + latency + request / cluster.connection * 1000.0;
        alone.max(node.link_free).max(self.store_free) as Time + 1
    }

    fn refuse(&mut self, now: Time, one: Sent) {
        self.found.refused += u64::from(one.requests);
        let process = &mut self.processes[one.process];
        if self.cluster.adaptive > 0.0 {
            process.window = (process.window / 2.0).max(1.0);
        }
        let answer = now + self.cluster.latency as Time;
        let wait = one.waited.min(LONGEST_WAIT);
        let wait = FIRST_WAIT + self.rng.below(2 * wait - FIRST_WAIT);
        let attempts = one.attempts + 1;
        if f64::from(attempts) > self.cluster.retries || answer + wait > one.first + GIVE_UP {
            self.found.failed += u64::from(one.requests);
            return self.at(answer, one.process, Event::Answered(one.requests));
        }
        let Sent { requests, first, .. } = one;
        self.at(
            answer + wait,
            one.process,
            Event::Resent { requests, attempts, first, waited: wait },
        );
    }
}

const HEAD: &[&str] = &[
    "batches/s of a node",
    "wait, median ms",
    "99 %",
    "requests/s",
    "refused",
    "failed/s",
    "GB/s from the store",
    "tier filled",
    "$/h",
];

fn row(cluster: &Cluster, mut found: Found) -> Vec<String> {
    found.waits.sort_unstable();
    let quantile = |share: f64| match found.waits.len() {
        0 => "–".to_owned(),
        many => found.waits[((many - 1) as f64 * share) as usize].to_string(),
    };
    let seconds = cluster.seconds;
    let rate = |count: u64| count as f64 / seconds;
    let sent = found.answered + found.refused;
    vec![
        short(rate(found.batches) / cluster.nodes),
        quantile(0.5),
        quantile(0.99),
        short(rate(sent)),
        format!("{:.0} %", 100.0 * found.refused as f64 / sent.max(1) as f64),
        short(rate(found.failed)),
        short(rate(found.answered) * cluster.request / 1e9),
        format!("{:.1} %", 100.0 * found.held),
        short(rate(found.answered) * 3600.0 / 1e6 * PRICE_PER_MILLION),
    ]
}

/// Three digits, with commas.
fn short(value: f64) -> String {
    let digits = if value == 0.0 || value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    let text = format!("{value:.digits$}");
    let whole = text.split('.').next().expect("a part").len();
    let comma = |(at, digit): (usize, char)| {
        let is_group = at > 0 && at < whole && (whole - at).is_multiple_of(3);
        [is_group.then_some(','), Some(digit)]
    };
    text.chars().enumerate().flat_map(comma).flatten().collect()
}

/// The table of these arguments: `name=value` or `name=value,value`.
fn table(arguments: &[String]) -> Result<String, String> {
    let mut clusters = vec![(vec![], Cluster::new())];
    let mut text = String::from("|");
    let mut columns = HEAD.len();
    for argument in arguments {
        let (name, values) = argument.split_once('=').ok_or_else(usage)?;
        let is_swept = values.contains(',');
        if is_swept {
            let _ = write!(text, " {name} |");
            columns += 1;
        }
        let mut each = vec![];
        for (shown, cluster) in &clusters {
            for value in values.split(',') {
                let (mut shown, mut cluster) = (Vec::clone(shown), Cluster::clone(cluster));
                cluster.set(name, value).ok_or_else(usage)?;
                shown.extend(is_swept.then(|| value.to_owned()));
                each.push((shown, cluster));
            }
        }
        clusters = each;
    }
    HEAD.iter().for_each(|name| text.extend([" ", name, " |"]));
    text.push_str("\n|");
    text.push_str(&"---|".repeat(columns));
    for (mut shown, cluster) in clusters {
        shown.extend(row(&cluster, Simulation::run(&cluster)));
        let _ = write!(text, "\n| {} |", shown.join(" | "));
    }
    Ok(text)
}

fn usage() -> String {
    let mut text = String::from("arguments, each NAME=VALUE or NAME=VALUE,VALUE:\n");
    for (name, default, about) in ARGUMENTS {
        let _ = writeln!(text, "  {name:<10} {about} [default: {default}]");
    }
    text
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match table(&arguments) {
        Ok(table) => println!("{table}"),
        Err(usage) => {
            eprint!("{usage}");
            std::process::exit(2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMAND: &str = "cargo run --release -p aquifer-testkit --example scale --";

    #[test]
    fn tables_of_the_document_are_what_its_commands_print() {
        let document = include_str!("../../../docs/scale.md");
        let mut parts = document.split(COMMAND);
        parts.next();
        let mut commands = 0;
        for part in parts {
            let (arguments, rest) = part.split_once("\n```\n").expect("a block of code ends");
            let arguments: Vec<_> = arguments.split_whitespace().map(str::to_owned).collect();
            let printed = table(&arguments).unwrap();
            assert!(
                rest.trim_start().starts_with(&printed),
                "{COMMAND} {}\n{printed}",
                arguments.join(" ")
            );
            commands += 1;
        }
        assert!(commands > 0, "the document has no command");
    }

    fn simulate(arguments: &str) -> Found {
        let mut cluster = Cluster::new();
        for argument in format!("nodes=10 seconds=10 {arguments}").split_whitespace() {
            let (name, value) = argument.split_once('=').unwrap();
            cluster.set(name, value).unwrap();
        }
        Simulation::run(&cluster)
    }

    #[test]
    fn a_store_with_capacity_refuses_nothing_and_every_batch_is_read() {
        let found = simulate("prefixes=1000");
        assert_eq!((found.refused, found.failed), (0, 0));
        // Those under way at the end are sent, not read.
        assert!(found.answered >= found.batches * 255 && found.batches > 100);
    }

    #[test]
    fn a_store_answers_no_more_than_it_can() {
        let found = simulate("prefixes=1");
        assert!(found.refused > 0);
        assert!(found.answered <= 11 * 5500, "{}", found.answered);
        assert!(found.answered > 9 * 5500, "{}", found.answered);
    }

    #[test]
    fn a_full_tier_asks_for_nothing() {
        for passes in 0..2 {
            let found = simulate(&format!("data=1T tier=1T warm=1 passes={passes}"));
            assert_eq!(found.answered + found.refused, 0);
            assert!(found.batches > 100);
        }
    }

    #[test]
    fn a_pass_over_more_than_the_tier_always_misses() {
        let found = simulate("passes=1 data=4G tier=2G request=8M batch=8 link=100G prefixes=99");
        assert!(found.answered >= 8 * found.batches, "{} {}", found.answered, found.batches);
        let passed_bytes = found.batches * 8 * (8 << 20) / 10;
        assert!(passed_bytes > 2 * (4 << 30), "not a second pass");
    }
}
