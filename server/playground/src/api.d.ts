// Written by build/types.mjs from openapi.json, sha256 1408e579819305107a3ae1b13bfc8bc72e50a6139b20e4f608368f93d1bd8c38
export interface paths {
    "/admin/reload": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Reload */
        post: operations["reload_admin_reload_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/captures": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** List Captures */
        get: operations["list_captures_captures_get"];
        put?: never;
        /** Start Capture */
        post: operations["start_capture_captures_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/captures/{name}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Show Capture */
        get: operations["show_capture_captures__name__get"];
        put?: never;
        post?: never;
        /** Delete Capture */
        delete: operations["delete_capture_captures__name__delete"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/captures/{name}/index": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Show Capture Index */
        get: operations["show_capture_index_captures__name__index_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/captures/{name}/pause": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Pause Capture */
        post: operations["pause_capture_captures__name__pause_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/captures/{name}/resume": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Resume Capture */
        post: operations["resume_capture_captures__name__resume_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/captures/{name}/source": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        /** Upload Capture Source */
        put: operations["upload_capture_source_captures__name__source_put"];
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/detokenize": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Detokenize */
        post: operations["detokenize_detokenize_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/generate": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Generate */
        post: operations["generate_generate_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/gradient": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Gradient */
        post: operations["gradient_gradient_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/lens": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Lens */
        post: operations["lens_lens_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/logprob": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Logprob */
        post: operations["logprob_logprob_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/models": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** List Models */
        get: operations["list_models_models_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/models/{model_id}/drain": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Drain Model */
        post: operations["drain_model_models__model_id__drain_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/models/{model_id}/load": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Load */
        post: operations["load_models__model_id__load_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/models/{model_id}/selftest": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Selftest */
        post: operations["selftest_models__model_id__selftest_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/models/{model_id}/unload": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Unload */
        post: operations["unload_models__model_id__unload_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/patch": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Patch */
        post: operations["patch_patch_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/perplexity": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Perplexity */
        post: operations["perplexity_perplexity_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/saes": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** List Saes */
        get: operations["list_saes_saes_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/saes/{name}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Show Sae */
        get: operations["show_sae_saes__name__get"];
        /** Upload Sae */
        put: operations["upload_sae_saes__name__put"];
        post?: never;
        /** Delete Sae */
        delete: operations["delete_sae_saes__name__delete"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/steer": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Steer */
        post: operations["steer_steer_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/sweep": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Sweep */
        post: operations["sweep_sweep_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/tokenize": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Tokenize */
        post: operations["tokenize_tokenize_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/variants/{name}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Show Variant */
        get: operations["show_variant_variants__name__get"];
        /** Put Variant */
        put: operations["put_variant_variants__name__put"];
        post?: never;
        /** Delete Variant */
        delete: operations["delete_variant_variants__name__delete"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/vectors": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** List Vectors */
        get: operations["list_vectors_vectors_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/vectors/train": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Vectors Train */
        post: operations["vectors_train_vectors_train_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/vectors/{name}": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Show Vector */
        get: operations["show_vector_vectors__name__get"];
        /** Upload Vector */
        put: operations["upload_vector_vectors__name__put"];
        post?: never;
        /** Delete Vector */
        delete: operations["delete_vector_vectors__name__delete"];
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/vectors/{name}/combine": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        get?: never;
        put?: never;
        /** Combine Vector */
        post: operations["combine_vector_vectors__name__combine_post"];
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
    "/vectors/{name}/content": {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        /** Download Vector */
        get: operations["download_vector_vectors__name__content_get"];
        put?: never;
        post?: never;
        delete?: never;
        options?: never;
        head?: never;
        patch?: never;
        trace?: never;
    };
}
export type webhooks = Record<string, never>;
export interface components {
    schemas: {
        ActivationItem: {
            messages?: components["schemas"]["Message"][] | null;
            token_ids?: number[] | null;
        };
        Aggregate: {
            early: number | null;
            late: number | null;
            max: number | null;
            mean: number | null;
            min: number | null;
            sum: number | null;
        } & {
            [key: string]: unknown;
        };
        CalledFunction: {
            arguments: string;
            name: string;
        };
        CaptureCard: {
            bytes: number;
            created: string;
            documents: number;
            documents_total: number;
            /** @enum {string} */
            dtype: "float32" | "float16";
            error?: string | null;
            hook: string;
            layers: number[];
            model: string;
            name: string;
            non_finite: number;
            num_shards: number;
            problems: number;
            /** @enum {string} */
            read: "each" | "last" | "mean";
            reduced?: components["schemas"]["CaptureSums"] | null;
            rows: number;
            seconds: number;
            server: string;
            /** @enum {string} */
            state: "running" | "paused" | "done" | "failed";
            tokens: number;
            truncated: number;
            weights_digest: string;
            width: number;
        } & {
            [key: string]: unknown;
        };
        CaptureExample: {
            document: number;
            position: number;
            reading: number | null;
            text: string;
            token_id: number;
        } & {
            [key: string]: unknown;
        };
        CaptureIndex: {
            bytes: number;
            changes?: string;
            created: string;
            digest: string;
            documents: number;
            documents_total: number;
            /** @enum {string} */
            dtype: "float32" | "float16";
            error?: string | null;
            failures: components["schemas"]["CaptureProblem"][];
            hook: string;
            layers: number[];
            model: string;
            name: string;
            non_finite: number;
            num_shards: number;
            problems: number;
            /** @enum {string} */
            read: "each" | "last" | "mean";
            reduced?: components["schemas"]["CaptureSums"] | null;
            request: {
                [key: string]: unknown;
            };
            rows: number;
            seconds: number;
            server: string;
            shards: components["schemas"]["CaptureShard"][];
            source: string;
            /** @enum {string} */
            state: "running" | "paused" | "done" | "failed";
            tokens: number;
            truncated: number;
            weights_digest: string;
            width: number;
        } & {
            [key: string]: unknown;
        };
        CaptureList: {
            captures: components["schemas"]["CaptureCard"][];
        } & {
            [key: string]: unknown;
        };
        CaptureNorms: {
            largest: number | null;
            mean: number | null;
            smallest: number | null;
            std: number | null;
        } & {
            [key: string]: unknown;
        };
        CaptureOptions: {
            /** @enum {string} */
            dtype?: "float32" | "float16";
            hook?: string;
            layers: number[];
            overwrite?: boolean;
            /** @enum {string} */
            point?: "after" | "before";
            positions?: ("all" | "prompt" | "completion" | "predicting" | "last_prompt") | components["schemas"]["PositionRule"];
            /** @enum {string} */
            read?: "each" | "last" | "mean";
            to?: string | null;
        };
        CaptureProblem: {
            code: string;
            detail: string;
            document: number;
        } & {
            [key: string]: unknown;
        };
        CaptureReduce: {
            covariance?: boolean;
            k?: number;
            mean?: boolean;
            norms?: boolean;
            top?: components["schemas"]["ProbeRequest"][] | null;
        };
        CaptureRequest: {
            adapter?: string | null;
            add_generation_prompt?: boolean | null;
            /** @enum {string} */
            bos?: "auto" | "always" | "never";
            chat_template_kwargs?: {
                [key: string]: unknown;
            } | null;
            continue_final_message?: boolean;
            /** @enum {string} */
            dtype?: "float32" | "float16";
            hook?: string;
            items?: (string | components["schemas"]["ActivationItem"])[] | null;
            layers: number[];
            max_length?: number | null;
            model?: string | null;
            name: string;
            /** @enum {string} */
            on_overflow?: "error" | "truncate_left";
            override?: components["schemas"]["ParameterOverride"] | null;
            overwrite?: boolean;
            positions?: "all" | components["schemas"]["SlicePositions"];
            /** @enum {string} */
            read?: "each" | "last" | "mean";
            reduce?: components["schemas"]["CaptureReduce"] | null;
            shard_rows?: number;
            shards?: boolean | null;
            source?: string | null;
            /** @enum {string} */
            special_tokens?: "parse" | "text";
            steering?: components["schemas"]["Steering"] | null;
            tools?: components["schemas"]["Tool"][] | null;
        };
        CaptureShard: {
            bytes: number;
            documents: number;
            first: number;
            rows: number;
        } & {
            [key: string]: unknown;
        };
        CaptureSource: {
            bytes: number;
            documents: number;
            name: string;
            sha256: string;
        } & {
            [key: string]: unknown;
        };
        CaptureSums: {
            non_finite: number;
            norms?: {
                [key: string]: components["schemas"]["CaptureNorms"];
            } | null;
            rows: number;
            sinks?: number;
            top?: components["schemas"]["CaptureTop"][] | null;
        } & {
            [key: string]: unknown;
        };
        CaptureTop: {
            examples: components["schemas"]["CaptureExample"][];
            hook: string;
            layer: number;
            name: string | null;
            read: string;
            sha256: string;
        } & {
            [key: string]: unknown;
        };
        ClampBounds: {
            max?: number | null;
            min?: number | null;
        };
        CombineRequest: {
            orthogonal_to?: string[];
            overwrite?: boolean;
            vectors: components["schemas"]["WeightedVector"][];
        };
        Completion: {
            activations?: components["schemas"]["TokenActivations"] | null;
            aggregates?: {
                [key: string]: components["schemas"]["Aggregate"];
            } | null;
            columns?: {
                [key: string]: (number | null)[];
            } | null;
            /** @enum {string} */
            finish_reason: "stop" | "length";
            logprob: number | null;
            logprobs: (number | null)[];
            num_tokens: number;
            probes?: components["schemas"]["ProbeReadings"][] | null;
            ranks?: number[] | null;
            seed: number;
            text: string;
            token_ids: number[];
            tokens: string[];
        } & {
            [key: string]: unknown;
        };
        ContrastPair: {
            negative: string | components["schemas"]["Message"][];
            positive: string | components["schemas"]["Message"][];
        };
        Deleted: {
            name: string;
            sha256: string | null;
        } & {
            [key: string]: unknown;
        };
        DetokenizeAnswer: {
            model: string;
            prompt?: string | null;
            texts: string[];
        } & {
            [key: string]: unknown;
        };
        DetokenizeRequest: {
            model?: string | null;
            token_ids?: number[][] | null;
            tokens?: number[] | null;
        };
        Divergence: {
            kl_max: number | null;
            kl_mean: number | null;
            kl_median: number | null;
            kl_p99: number | null;
            num_tokens: number;
            reference: string;
            top1_agreement: number | null;
        } & {
            [key: string]: unknown;
        };
        Encoded: {
            offsets: ([
                number,
                number
            ] | null)[];
            token_ids: number[];
            tokens: string[];
        } & {
            [key: string]: unknown;
        };
        GenerateAnswer: {
            adapter?: components["schemas"]["UsedAdapter"] | null;
            captured?: components["schemas"]["StoredActivations"] | null;
            id: string;
            model: string;
            override?: components["schemas"]["UsedOverride"] | null;
            provenance: components["schemas"]["Provenance"];
            results: components["schemas"]["PromptCompletions"][];
            steering?: components["schemas"]["SteeringReceipt"] | null;
            timing: components["schemas"]["Timing"];
            usage: components["schemas"]["Usage"];
        } & {
            [key: string]: unknown;
        };
        GenerateRequest: {
            adapter?: string | null;
            add_generation_prompt?: boolean | null;
            allowed_token_ids?: number[] | null;
            bad_words?: string[];
            /** @enum {string} */
            bos?: "auto" | "always" | "never";
            cache?: boolean;
            capture?: components["schemas"]["CaptureOptions"] | null;
            chat_template_kwargs?: {
                [key: string]: unknown;
            } | null;
            columns?: ("logprob" | "rank" | "entropy" | "logit_mean" | "logit_std" | "log_q" | "rb_entropy" | "head_mass" | "tail_mass" | "top1_prob" | "margin" | "two_point_entropy" | "collision" | "renyi2" | "effective_support" | "eos_prob")[] | null;
            continue_final_message?: boolean;
            diagnostics?: boolean;
            frequency_penalty?: number;
            ignore_eos?: boolean;
            include_stop?: boolean;
            logit_bias?: {
                [key: string]: number;
            };
            max_tokens?: number;
            messages?: components["schemas"]["Message"][] | components["schemas"]["Message"][][] | null;
            min_p?: number;
            min_tokens?: number;
            model?: string | null;
            n?: number;
            /** @enum {string} */
            on_error?: "fail" | "report";
            /** @enum {string} */
            on_overflow?: "error" | "truncate_left";
            override?: components["schemas"]["ParameterOverride"] | null;
            /** @enum {string} */
            precision?: "float32" | "float64";
            presence_penalty?: number;
            probes?: components["schemas"]["ProbeRequest"][] | null;
            prompt_ids?: number[][] | null;
            prompts?: string[] | null;
            repetition_penalty?: number;
            seed?: number | null;
            /** @enum {string} */
            special_tokens?: "parse" | "text";
            steering?: components["schemas"]["Steering"] | null;
            stop?: string[];
            stop_token_ids?: number[];
            stream?: boolean;
            temperature?: number;
            tools?: components["schemas"]["Tool"][] | null;
            top_k?: number;
            top_p?: number;
            window?: number;
        };
        GradientAnswer: {
            adapter?: components["schemas"]["UsedAdapter"] | null;
            along?: components["schemas"]["UsedOverride"] | null;
            id: string;
            model: string;
            override?: components["schemas"]["UsedOverride"] | null;
            provenance: components["schemas"]["Provenance"];
            results: components["schemas"]["ItemGradients"][];
            steering?: components["schemas"]["SteeringReceipt"] | null;
            timing: components["schemas"]["Timing"];
            usage: components["schemas"]["Usage"];
        } & {
            [key: string]: unknown;
        };
        GradientRequest: {
            adapter?: string | null;
            add_generation_prompt?: boolean | null;
            attribution?: ("gradient_x_input" | "integrated") | null;
            baseline?: number | null;
            /** @enum {string} */
            bos?: "auto" | "always" | "never";
            /** @enum {string} */
            boundary?: "joint" | "separate";
            cache?: boolean;
            chat_template_kwargs?: {
                [key: string]: unknown;
            } | null;
            continue_final_message?: boolean;
            items: components["schemas"]["LogprobItem"][];
            model?: string | null;
            /** @enum {string} */
            on_error?: "fail" | "report";
            /** @enum {string} */
            on_overflow?: "error" | "truncate_left";
            override?: components["schemas"]["ParameterOverride"] | null;
            /** @enum {string} */
            special_tokens?: "parse" | "text";
            steering?: components["schemas"]["Steering"] | null;
            steps?: number;
            tools?: components["schemas"]["Tool"][] | null;
            wrt?: components["schemas"]["GradientVariable"] | null;
        };
        GradientVariable: {
            hook?: string;
            layers?: number[] | null;
            override?: string | null;
            positions?: ("all" | "prompt" | "completion" | "predicting" | "last_prompt") | components["schemas"]["SlicePositions"];
        };
        ItemGradients: {
            problem?: components["schemas"]["Problem"] | null;
            targets?: components["schemas"]["TargetGradient"][];
        } & {
            [key: string]: unknown;
        };
        ItemScore: {
            best?: number | null;
            choice_probs?: (number | null)[];
            flags?: string[];
            problem?: components["schemas"]["Problem"] | null;
            targets?: components["schemas"]["ScoredTarget"][];
        } & {
            [key: string]: unknown;
        };
        LayerQuality: {
            accuracy?: number | null;
            activation_norm?: number | null;
            auc?: number | null;
            gain?: number | null;
            harm?: number | null;
            left_out?: number | null;
            pair_accuracy?: number | null;
            scale?: number | null;
        } & {
            [key: string]: unknown;
        };
        LensAnswer: {
            adapter?: components["schemas"]["UsedAdapter"] | null;
            id: string;
            model: string;
            override?: components["schemas"]["UsedOverride"] | null;
            provenance: components["schemas"]["Provenance"];
            results: components["schemas"]["LensItem"][];
            steering?: components["schemas"]["SteeringReceipt"] | null;
            timing: components["schemas"]["Timing"];
            usage: components["schemas"]["Usage"];
        } & {
            [key: string]: unknown;
        };
        LensItem: {
            problem?: components["schemas"]["Problem"] | null;
            targets?: components["schemas"]["LensTarget"][];
        } & {
            [key: string]: unknown;
        };
        LensRequest: {
            adapter?: string | null;
            add_generation_prompt?: boolean | null;
            /** @enum {string} */
            bos?: "auto" | "always" | "never";
            /** @enum {string} */
            boundary?: "joint" | "separate";
            cache?: boolean;
            chat_template_kwargs?: {
                [key: string]: unknown;
            } | null;
            columns?: ("logprob" | "rank" | "entropy" | "logit_mean" | "logit_std" | "log_q" | "rb_entropy" | "head_mass" | "tail_mass" | "top1_prob" | "margin" | "two_point_entropy" | "collision" | "renyi2" | "effective_support" | "eos_prob")[];
            continue_final_message?: boolean;
            detokenize?: boolean;
            items: (string | components["schemas"]["LogprobItem"])[];
            layers?: number[] | null;
            model?: string | null;
            /** @enum {string} */
            on_error?: "fail" | "report";
            /** @enum {string} */
            on_overflow?: "error" | "truncate_left";
            override?: components["schemas"]["ParameterOverride"] | null;
            policy?: components["schemas"]["SamplingPolicy"];
            /** @enum {string} */
            precision?: "float32" | "float64";
            /** @enum {string} */
            special_tokens?: "parse" | "text";
            steering?: components["schemas"]["Steering"] | null;
            tail?: boolean;
            tools?: components["schemas"]["Tool"][] | null;
            top?: number;
        };
        LensRows: {
            activations?: components["schemas"]["TokenActivations"] | null;
            alternatives?: components["schemas"]["ListedTokens"] | null;
            columns?: {
                [key: string]: (number | null)[];
            } | null;
            logprob: number | null;
            logprobs: (number | null)[];
            probes?: components["schemas"]["ProbeReadings"][] | null;
            ranks?: number[] | null;
            top?: components["schemas"]["TopAlternatives"] | null;
        } & {
            [key: string]: unknown;
        };
        LensTarget: {
            /** @enum {string} */
            boundary: "exact" | "merged" | "no_context";
            flags?: string[];
            layers: {
                [key: string]: components["schemas"]["LensRows"];
            };
            offsets?: [
                number,
                number
            ][] | null;
            target: string;
            token_ids: number[];
            tokens: string[];
            truncated_tokens?: number;
        } & {
            [key: string]: unknown;
        };
        ListedTokens: {
            logprobs: (number | null)[][];
            tail?: (number | null)[] | null;
        } & {
            [key: string]: unknown;
        };
        LogprobAnswer: {
            adapter?: components["schemas"]["UsedAdapter"] | null;
            captured?: components["schemas"]["StoredActivations"] | null;
            id: string;
            model: string;
            override?: components["schemas"]["UsedOverride"] | null;
            provenance: components["schemas"]["Provenance"];
            results: components["schemas"]["ItemScore"][];
            steering?: components["schemas"]["SteeringReceipt"] | null;
            timing: components["schemas"]["Timing"];
            usage: components["schemas"]["Usage"];
        } & {
            [key: string]: unknown;
        };
        LogprobItem: {
            alternatives?: (number[] | number[][][]) | null;
            context?: string | null;
            context_ids?: number[] | null;
            messages?: components["schemas"]["Message"][] | null;
            target_ids?: number[][] | null;
            targets?: string[] | null;
        };
        LogprobRequest: {
            adapter?: string | null;
            add_generation_prompt?: boolean | null;
            /** @enum {string} */
            bos?: "auto" | "always" | "never";
            /** @enum {string} */
            boundary?: "joint" | "separate";
            cache?: boolean;
            capture?: components["schemas"]["CaptureOptions"] | null;
            chat_template_kwargs?: {
                [key: string]: unknown;
            } | null;
            columns?: ("logprob" | "rank" | "entropy" | "logit_mean" | "logit_std" | "log_q" | "rb_entropy" | "head_mass" | "tail_mass" | "top1_prob" | "margin" | "two_point_entropy" | "collision" | "renyi2" | "effective_support" | "eos_prob")[];
            continue_final_message?: boolean;
            detokenize?: boolean;
            /** @enum {string} */
            dtype?: "float32" | "float16";
            items: components["schemas"]["LogprobItem"][];
            model?: string | null;
            /** @enum {string} */
            on_error?: "fail" | "report";
            /** @enum {string} */
            on_overflow?: "error" | "truncate_left";
            override?: components["schemas"]["ParameterOverride"] | null;
            per_token?: boolean;
            policy?: components["schemas"]["SamplingPolicy"];
            /** @enum {string} */
            precision?: "float32" | "float64";
            probes?: components["schemas"]["ProbeRequest"][] | null;
            /** @enum {string} */
            space?: "as_given" | "both" | "best";
            /** @enum {string} */
            special_tokens?: "parse" | "text";
            steering?: components["schemas"]["Steering"] | null;
            step_tokens?: number | null;
            tail?: boolean;
            tools?: components["schemas"]["Tool"][] | null;
            top?: number;
            vocabulary?: boolean;
        };
        Message: {
            content?: string;
            name?: string | null;
            /** @enum {string} */
            role: "system" | "developer" | "user" | "assistant" | "tool";
            tool_call_id?: string | null;
            tool_calls?: components["schemas"]["ToolCall"][] | null;
        };
        ModelCard: {
            columns?: string[] | null;
            context_length?: number | null;
            detail: string;
            /** @enum {string} */
            engine: "vllm" | "transformer_lens" | "fake";
            has_chat_template?: boolean | null;
            hidden_size?: number | null;
            hooks?: string[] | null;
            id: string;
            lacks?: {
                [key: string]: string;
            } | null;
            num_layers?: number | null;
            provenance?: components["schemas"]["Provenance"] | null;
            replicas?: components["schemas"]["ReplicaCard"][];
            required: boolean;
            restarts?: number;
            rounding?: number | null;
            /** @enum {string} */
            state: "loading" | "ready" | "restarting" | "failed" | "draining" | "unloaded";
            variant_of?: string | null;
            vocab_size?: number | null;
        } & {
            [key: string]: unknown;
        };
        ModelList: {
            models: components["schemas"]["ModelCard"][];
            variants?: components["schemas"]["VariantCard"][];
        } & {
            [key: string]: unknown;
        };
        ParameterOverride: {
            cast?: "float32" | null;
            eta: number;
            name: string;
        };
        PatchAnswer: {
            adapter?: components["schemas"]["UsedAdapter"] | null;
            /** @enum {string} */
            direction: "denoise" | "noise";
            hook: string;
            id: string;
            /** @enum {string} */
            metric: "logprob" | "difference" | "kl";
            model: string;
            override?: components["schemas"]["UsedOverride"] | null;
            provenance: components["schemas"]["Provenance"];
            results: components["schemas"]["PatchResult"][];
            timing: components["schemas"]["Timing"];
            usage: components["schemas"]["Usage"];
        } & {
            [key: string]: unknown;
        };
        PatchPair: {
            align?: number[][] | null;
            clean: components["schemas"]["LogprobItem"];
            corrupted: components["schemas"]["LogprobItem"];
        };
        PatchRequest: {
            adapter?: string | null;
            add_generation_prompt?: boolean | null;
            /** @enum {string} */
            bos?: "auto" | "always" | "never";
            /** @enum {string} */
            boundary?: "joint" | "separate";
            cache?: boolean;
            chat_template_kwargs?: {
                [key: string]: unknown;
            } | null;
            continue_final_message?: boolean;
            /** @enum {string} */
            direction?: "denoise" | "noise";
            hook?: string;
            layers?: number[][] | null;
            /** @enum {string} */
            metric?: "logprob" | "difference" | "kl";
            model?: string | null;
            /** @enum {string} */
            on_overflow?: "error" | "truncate_left";
            override?: components["schemas"]["ParameterOverride"] | null;
            pairs: components["schemas"]["PatchPair"][];
            positions?: number[] | null;
            /** @enum {string} */
            precision?: "float32" | "float64";
            /** @enum {string} */
            special_tokens?: "parse" | "text";
            tools?: components["schemas"]["Tool"][] | null;
        };
        PatchResult: {
            /** @enum {string} */
            boundary: "exact" | "merged" | "no_context";
            clean: number | null;
            corrupted: number | null;
            layers: number[][];
            matrix: (number | null)[][];
            positions: number[];
            tokens: string[];
            truncated_tokens?: number;
        } & {
            [key: string]: unknown;
        };
        PerplexityAnswer: {
            adapter?: components["schemas"]["UsedAdapter"] | null;
            captured?: components["schemas"]["StoredActivations"] | null;
            divergence?: components["schemas"]["Divergence"] | null;
            id: string;
            model: string;
            override?: components["schemas"]["UsedOverride"] | null;
            provenance: components["schemas"]["Provenance"];
            results: components["schemas"]["TextResult"][];
            steering?: components["schemas"]["SteeringReceipt"] | null;
            timing: components["schemas"]["Timing"];
            total: components["schemas"]["TextScore"];
            usage: components["schemas"]["Usage"];
        } & {
            [key: string]: unknown;
        };
        PerplexityRequest: {
            adapter?: string | null;
            add_generation_prompt?: boolean | null;
            /** @enum {string} */
            bos?: "auto" | "always" | "never";
            cache?: boolean;
            capture?: components["schemas"]["CaptureOptions"] | null;
            chat_template_kwargs?: {
                [key: string]: unknown;
            } | null;
            columns?: ("logprob" | "rank" | "entropy" | "logit_mean" | "logit_std" | "log_q" | "rb_entropy" | "head_mass" | "tail_mass" | "top1_prob" | "margin" | "two_point_entropy" | "collision" | "renyi2" | "effective_support" | "eos_prob")[];
            context_length?: number | null;
            continue_final_message?: boolean;
            messages?: components["schemas"]["Message"][] | components["schemas"]["Message"][][] | null;
            model?: string | null;
            /** @enum {string} */
            on_error?: "fail" | "report";
            /** @enum {string} */
            on_overflow?: "error" | "truncate_left";
            override?: components["schemas"]["ParameterOverride"] | null;
            policy?: components["schemas"]["SamplingPolicy"];
            /** @enum {string} */
            precision?: "float32" | "float64";
            probes?: components["schemas"]["ProbeRequest"][] | null;
            /** @enum {string} */
            protocol?: "sliding" | "rolling" | "disjoint" | "llamacpp" | "exl3";
            reference?: string | null;
            rows?: number | null;
            /** @enum {string} */
            special_tokens?: "parse" | "text";
            steering?: components["schemas"]["Steering"] | null;
            stream?: boolean;
            stride?: number | null;
            texts?: (string | number[])[] | null;
            tokens?: boolean;
            tools?: components["schemas"]["Tool"][] | null;
            windows?: boolean;
        };
        PositionRule: {
            after?: string | null;
            completion?: [
                number,
                number
            ] | null;
            every?: number | null;
            last?: number | null;
            slices?: [
                number,
                number
            ][] | null;
            token_ids?: number[] | null;
        };
        ProbeReadings: {
            after?: (number | null)[] | null;
            before: (number | null)[];
            context_after?: (number | null)[] | null;
            context_before?: (number | null)[] | null;
            flags?: string[];
            hook: string;
            layer: number;
            name: string | null;
            /** @enum {string} */
            read: "projection" | "cosine" | "probability" | "activation";
            sha256: string;
        } & {
            [key: string]: unknown;
        };
        ProbeRequest: {
            context?: boolean;
            data?: {
                [key: string]: number[] | string;
            } | null;
            feature?: number | string | null;
            from_layer?: number | null;
            hook?: string | null;
            layers?: number[] | "recommended" | null;
            name?: string | null;
            /** @enum {string} */
            read?: "projection" | "cosine" | "probability" | "activation";
            sae?: string | null;
            sha256?: string | null;
        };
        ProbedVector: {
            data?: {
                [key: string]: number[] | string;
            } | null;
            feature?: number | string | null;
            from_layer?: number | null;
            hook?: string | null;
            layers?: number[] | "recommended" | null;
            name?: string | null;
            /** @enum {string} */
            read?: "projection" | "cosine" | "probability" | "activation";
            sae?: string | null;
            sha256?: string | null;
        };
        Problem: {
            /** @enum {string} */
            code: "invalid_request" | "context_too_long" | "boundary_empty" | "unsupported_by_engine" | "invalid_vector" | "invalid_adapter" | "invalid_sae" | "non_finite" | "unauthorized" | "forbidden" | "not_found" | "unknown_model" | "unknown_vector" | "unknown_override" | "unknown_adapter" | "unknown_sae" | "method_not_allowed" | "exists" | "in_use" | "payload_too_large" | "overloaded" | "rate_limited" | "model_loading" | "engine_restarting" | "out_of_memory" | "deadline_exceeded" | "internal";
            detail: string;
            param?: string | null;
            request_id: string;
            retryable: boolean;
            status: number;
            title: string;
            type: string;
        } & {
            [key: string]: unknown;
        };
        PromptCompletions: {
            baseline?: components["schemas"]["Completion"][] | null;
            completions?: components["schemas"]["Completion"][];
            problem?: components["schemas"]["Problem"] | null;
            prompt_ids?: number[];
            truncated_tokens?: number;
        } & {
            [key: string]: unknown;
        };
        Provenance: {
            batch_invariant: boolean;
            cast?: "float32" | null;
            context_length?: number | null;
            dequantised_from?: string | null;
            device?: string | null;
            dtype: string;
            /** @enum {string} */
            engine: "vllm" | "transformer_lens" | "fake";
            engine_version: string;
            int8_products?: ("integer" | "float32_blocks") | null;
            logits_dtype: string;
            model_path: string;
            pipeline_parallel: number;
            /** @enum {string} */
            precision?: "float32" | "float64";
            protocol?: string | null;
            quantization: string | null;
            rows?: number | null;
            stride?: number | null;
            tensor_parallel: number;
            tf32?: boolean;
            tokenizer_digest: string;
            vocab_size: number;
            weights_digest: string;
        } & {
            [key: string]: unknown;
        };
        Recommendation: {
            gain?: number | null;
            harm?: number | null;
            layer: number;
            pairs?: number | null;
            reason: string;
            /** @enum {string} */
            recommended_by: "effect" | "separation";
            relative_norm: number;
            scale: number;
        } & {
            [key: string]: unknown;
        };
        ReloadAnswer: {
            added: string[];
            failed: {
                [key: string]: string;
            };
            needs_restart: string[];
            pending: string[];
            removed: string[];
            replaced: string[];
            unchanged: string[];
        } & {
            [key: string]: unknown;
        };
        ReplicaCard: {
            detail: string;
            num_jobs?: number;
            restarts?: number;
            /** @enum {string} */
            state: "loading" | "ready" | "restarting" | "failed" | "draining" | "unloaded";
        } & {
            [key: string]: unknown;
        };
        SaeCard: {
            architecture: string;
            bytes: number;
            created: string;
            features: number;
            hook: string;
            k?: number | null;
            labels: number;
            layer: number;
            model_hint?: string | null;
            name: string;
            sha256: string;
            width: number;
        } & {
            [key: string]: unknown;
        };
        SaeList: {
            bytes: number;
            damaged?: string[];
            max_bytes: number;
            saes: components["schemas"]["SaeCard"][];
        } & {
            [key: string]: unknown;
        };
        SamplingPolicy: {
            allowed_token_ids?: number[] | null;
            bad_words?: string[];
            frequency_penalty?: number;
            logit_bias?: {
                [key: string]: number;
            };
            min_p?: number;
            min_tokens?: number;
            presence_penalty?: number;
            repetition_penalty?: number;
            stop_token_ids?: number[];
            temperature?: number;
            top_k?: number;
            top_p?: number;
        };
        ScoredTarget: {
            activations?: components["schemas"]["TokenActivations"] | null;
            aggregates?: {
                [key: string]: components["schemas"]["Aggregate"];
            } | null;
            alternatives?: components["schemas"]["ListedTokens"] | null;
            /** @enum {string} */
            boundary: "exact" | "merged" | "no_context";
            columns?: {
                [key: string]: (number | null)[];
            } | null;
            flags?: string[];
            is_greedy?: boolean | null;
            logprob: number | null;
            logprob_any_space?: number | null;
            logprobs?: (number | null)[] | null;
            num_bytes: number;
            num_tokens: number;
            offsets?: [
                number,
                number
            ][] | null;
            perplexity?: number | null;
            prob?: number | null;
            probes?: components["schemas"]["ProbeReadings"][] | null;
            ranks?: number[] | null;
            sequence?: string | null;
            target: string;
            token_ids?: number[] | null;
            tokens?: string[] | null;
            top?: components["schemas"]["TopAlternatives"] | null;
            truncated_tokens?: number;
            variants?: components["schemas"]["SpaceVariants"] | null;
            vocabulary_logprobs?: (number | null)[][] | null;
        } & {
            [key: string]: unknown;
        };
        SelftestAnswer: {
            against?: string | null;
            checks: components["schemas"]["SelftestCheck"][];
            id: string;
            model: string;
            num_texts: number;
            num_tokens: number;
            provenance: components["schemas"]["Provenance"];
            seconds: number;
            timing: components["schemas"]["Timing"];
            usage: components["schemas"]["Usage"];
            /** @enum {string} */
            verdict: "passed" | "failed" | "not_run";
        } & {
            [key: string]: unknown;
        };
        SelftestCheck: {
            largest_difference: number | null;
            /** @enum {string} */
            name: "repeated" | "batched" | "shuffled" | "target_rows" | "sampled" | "steered_sampled" | "drawn" | "zero_scale" | "steered_neighbour" | "prefix_cached" | "chunked" | "replicas" | "against" | "against_steered";
            noise_floor: number;
            num_compared: number;
            promise: string;
            reason: string;
            rms_difference: number | null;
            tolerance: number;
            /** @enum {string} */
            verdict: "passed" | "failed" | "not_run";
        } & {
            [key: string]: unknown;
        };
        SelftestRequest: {
            against?: string | null;
            stream?: boolean;
            texts?: string[];
            token_ids?: number[][];
        };
        SimilarVector: {
            cosine: number;
            name: string;
            sha256: string;
        } & {
            [key: string]: unknown;
        };
        SimilarVectors: {
            compared: number;
            layers: {
                [key: string]: components["schemas"]["SimilarVector"][];
            };
            left_out: number;
        } & {
            [key: string]: unknown;
        };
        SlicePositions: {
            slices: [
                number,
                number
            ][];
        };
        SpaceVariants: {
            with_space: components["schemas"]["TargetScore"];
            without_space: components["schemas"]["TargetScore"];
        } & {
            [key: string]: unknown;
        };
        SteerAnswer: {
            adapter?: components["schemas"]["UsedAdapter"] | null;
            captured?: components["schemas"]["StoredActivations"] | null;
            id: string;
            model: string;
            override?: components["schemas"]["UsedOverride"] | null;
            provenance: components["schemas"]["Provenance"];
            results: components["schemas"]["PromptCompletions"][];
            steering: components["schemas"]["SteeringReceipt"];
            timing: components["schemas"]["Timing"];
            usage: components["schemas"]["Usage"];
        } & {
            [key: string]: unknown;
        };
        SteerRequest: {
            adapter?: string | null;
            add_generation_prompt?: boolean | null;
            allowed_token_ids?: number[] | null;
            bad_words?: string[];
            baseline?: boolean;
            /** @enum {string} */
            bos?: "auto" | "always" | "never";
            cache?: boolean;
            capture?: components["schemas"]["CaptureOptions"] | null;
            chat_template_kwargs?: {
                [key: string]: unknown;
            } | null;
            columns?: ("logprob" | "rank" | "entropy" | "logit_mean" | "logit_std" | "log_q" | "rb_entropy" | "head_mass" | "tail_mass" | "top1_prob" | "margin" | "two_point_entropy" | "collision" | "renyi2" | "effective_support" | "eos_prob")[] | null;
            continue_final_message?: boolean;
            frequency_penalty?: number;
            ignore_eos?: boolean;
            include_stop?: boolean;
            logit_bias?: {
                [key: string]: number;
            };
            max_tokens?: number;
            messages?: components["schemas"]["Message"][] | components["schemas"]["Message"][][] | null;
            min_p?: number;
            min_tokens?: number;
            model?: string | null;
            n?: number;
            /** @enum {string} */
            on_error?: "fail" | "report";
            /** @enum {string} */
            on_overflow?: "error" | "truncate_left";
            override?: components["schemas"]["ParameterOverride"] | null;
            /** @enum {string} */
            precision?: "float32" | "float64";
            presence_penalty?: number;
            probes?: components["schemas"]["ProbeRequest"][] | null;
            prompt_ids?: number[][] | null;
            prompts?: string[] | null;
            repetition_penalty?: number;
            seed?: number | null;
            /** @enum {string} */
            special_tokens?: "parse" | "text";
            steering: components["schemas"]["Steering"];
            stop?: string[];
            stop_token_ids?: number[];
            stream?: boolean;
            temperature?: number;
            tools?: components["schemas"]["Tool"][] | null;
            top_k?: number;
            top_p?: number;
        };
        SteeredSite: {
            relative_norm: number | null;
            tokens: number;
        } & {
            [key: string]: unknown;
        };
        Steering: {
            positions?: ("all" | "prompt" | "completion" | "predicting" | "last_prompt") | components["schemas"]["PositionRule"];
            vectors: components["schemas"]["SteeringVector"][];
        } | string | string[];
        SteeringCondition: {
            above?: number | null;
            below?: number | null;
            /** @enum {string} */
            of?: "token" | "prompt";
            probe: components["schemas"]["ProbedVector"];
        };
        SteeringReceipt: {
            layers: {
                [key: string]: components["schemas"]["SteeredSite"];
            };
            tokens_steered: number;
            vectors: components["schemas"]["UsedVector"][];
        } & {
            [key: string]: unknown;
        };
        SteeringVector: {
            data?: {
                [key: string]: number[] | string;
            } | null;
            feature?: number | string | null;
            from_layer?: number | null;
            hook?: string | null;
            layers?: number[] | "recommended" | null;
            name?: string | null;
            /** @enum {string} */
            op?: "add" | "ablate" | "project" | "clamp" | "replace" | "rotate";
            params?: components["schemas"]["ClampBounds"] | null;
            positions?: (("all" | "prompt" | "completion" | "predicting" | "last_prompt") | components["schemas"]["PositionRule"]) | null;
            sae?: string | null;
            scale?: number | "recommended";
            sha256?: string | null;
            /** @enum {string} */
            unit?: "raw" | "unit" | "residual_norm";
            when?: components["schemas"]["SteeringCondition"] | null;
        };
        StoredActivations: {
            bytes: number;
            documents: number;
            name: string;
            num_shards: number;
            rows: number;
        } & {
            [key: string]: unknown;
        };
        SweepAnswer: {
            adapter?: components["schemas"]["UsedAdapter"] | null;
            id: string;
            model: string;
            override?: components["schemas"]["UsedOverride"] | null;
            points: components["schemas"]["SweepPoint"][];
            provenance: components["schemas"]["Provenance"];
            timing: components["schemas"]["Timing"];
            unsteered: components["schemas"]["SweepPoint"];
            usage: components["schemas"]["Usage"];
        } & {
            [key: string]: unknown;
        };
        SweepPoint: {
            items: components["schemas"]["SweptItem"][];
            layers: number[] | null;
            relative_norm: number | null;
            scale: number;
            texts: components["schemas"]["SweptText"][];
        } & {
            [key: string]: unknown;
        };
        SweepRequest: {
            adapter?: string | null;
            add_generation_prompt?: boolean | null;
            /** @enum {string} */
            bos?: "auto" | "always" | "never";
            /** @enum {string} */
            boundary?: "joint" | "separate";
            cache?: boolean;
            chat_template_kwargs?: {
                [key: string]: unknown;
            } | null;
            continue_final_message?: boolean;
            items?: components["schemas"]["LogprobItem"][];
            layers?: number[][] | null;
            model?: string | null;
            /** @enum {string} */
            on_overflow?: "error" | "truncate_left";
            override?: components["schemas"]["ParameterOverride"] | null;
            /** @enum {string} */
            precision?: "float32" | "float64";
            scales: number[];
            /** @enum {string} */
            special_tokens?: "parse" | "text";
            steering: components["schemas"]["Steering"];
            texts?: string[];
            tools?: components["schemas"]["Tool"][] | null;
        };
        SweptItem: {
            kl: number | null;
            targets: components["schemas"]["SweptTarget"][];
        } & {
            [key: string]: unknown;
        };
        SweptTarget: {
            /** @enum {string} */
            boundary?: "exact" | "merged" | "no_context";
            change: number | null;
            logprob: number | null;
            truncated_tokens?: number;
        } & {
            [key: string]: unknown;
        };
        SweptText: {
            num_scored: number;
            perplexity: number | null;
            sum_logprob: number | null;
        } & {
            [key: string]: unknown;
        };
        TargetGradient: {
            attributions?: (number | null)[] | null;
            baseline_logprob?: number | null;
            /** @enum {string} */
            boundary: "exact" | "merged" | "no_context";
            convergence_delta?: number | null;
            directional?: number | null;
            directional_per_token?: (number | null)[] | null;
            flags?: string[];
            gradients?: {
                [key: string]: (number | null)[][];
            } | null;
            input_ids?: number[] | null;
            input_tokens?: string[] | null;
            logprob: number | null;
            logprobs: (number | null)[];
            norms?: {
                [key: string]: (number | null)[];
            } | null;
            num_context: number;
            positions?: number[] | null;
            target: string;
            token_ids: number[];
            truncated_tokens?: number;
        } & {
            [key: string]: unknown;
        };
        TargetScore: {
            activations?: components["schemas"]["TokenActivations"] | null;
            aggregates?: {
                [key: string]: components["schemas"]["Aggregate"];
            } | null;
            alternatives?: components["schemas"]["ListedTokens"] | null;
            /** @enum {string} */
            boundary: "exact" | "merged" | "no_context";
            columns?: {
                [key: string]: (number | null)[];
            } | null;
            flags?: string[];
            is_greedy?: boolean | null;
            logprob: number | null;
            logprobs?: (number | null)[] | null;
            num_bytes: number;
            num_tokens: number;
            offsets?: [
                number,
                number
            ][] | null;
            perplexity?: number | null;
            prob?: number | null;
            probes?: components["schemas"]["ProbeReadings"][] | null;
            ranks?: number[] | null;
            target: string;
            token_ids?: number[] | null;
            tokens?: string[] | null;
            top?: components["schemas"]["TopAlternatives"] | null;
            truncated_tokens?: number;
        } & {
            [key: string]: unknown;
        };
        TextResult: {
            bits_per_byte: number | null;
            byte_perplexity: number | null;
            flags?: string[];
            num_bytes: number;
            num_chars: number;
            num_scored: number;
            num_tokens: number;
            num_words: number;
            perplexity: number | null;
            problem?: components["schemas"]["Problem"] | null;
            stderr: number | null;
            sum_logprob: number | null;
            sum_squared_logprob: number | null;
            tokens?: components["schemas"]["TokenScores"] | null;
            windows?: components["schemas"]["WindowScore"][] | null;
            word_perplexity: number | null;
        } & {
            [key: string]: unknown;
        };
        TextScore: {
            bits_per_byte: number | null;
            byte_perplexity: number | null;
            flags?: string[];
            num_bytes: number;
            num_chars: number;
            num_scored: number;
            num_tokens: number;
            num_words: number;
            perplexity: number | null;
            stderr: number | null;
            sum_logprob: number | null;
            sum_squared_logprob: number | null;
            word_perplexity: number | null;
        } & {
            [key: string]: unknown;
        };
        Timing: {
            engine_ms: number;
            queue_ms: number;
        } & {
            [key: string]: unknown;
        };
        TokenActivations: {
            layers: {
                [key: string]: (number | null)[][];
            };
            positions: number[];
            sinks?: {
                [key: string]: number[];
            };
        } & {
            [key: string]: unknown;
        };
        TokenScores: {
            activations?: components["schemas"]["TokenActivations"] | null;
            columns?: {
                [key: string]: (number | null)[];
            } | null;
            logprobs: (number | null)[];
            positions: number[];
            probes?: components["schemas"]["ProbeReadings"][] | null;
            ranks?: number[] | null;
            token_ids: number[];
            tokens?: string[] | null;
        } & {
            [key: string]: unknown;
        };
        TokenizeAnswer: {
            count?: number | null;
            max_model_len?: number | null;
            model: string;
            results: components["schemas"]["Encoded"][];
            tokens?: number[] | null;
        } & {
            [key: string]: unknown;
        };
        TokenizeRequest: {
            add_generation_prompt?: boolean | null;
            add_special_tokens?: boolean;
            /** @enum {string} */
            bos?: "auto" | "always" | "never";
            chat_template_kwargs?: {
                [key: string]: unknown;
            } | null;
            continue_final_message?: boolean;
            messages?: components["schemas"]["Message"][] | components["schemas"]["Message"][][] | null;
            model?: string | null;
            prompt?: string | null;
            /** @enum {string} */
            special_tokens?: "parse" | "text";
            texts?: string[] | null;
            tools?: components["schemas"]["Tool"][] | null;
        };
        Tool: {
            function: components["schemas"]["ToolFunction"];
            /** @constant */
            type: "function";
        };
        ToolCall: {
            function: components["schemas"]["CalledFunction"];
            id?: string | null;
            /** @constant */
            type?: "function";
        };
        ToolFunction: {
            description?: string | null;
            name: string;
            parameters?: {
                [key: string]: unknown;
            } | null;
            strict?: boolean | null;
        };
        TopAlternatives: {
            logprobs: (number | null)[][];
            tail?: (number | null)[] | null;
            token_ids: number[][];
            tokens?: string[][];
        } & {
            [key: string]: unknown;
        };
        TrainAnswer: {
            id: string;
            layer_cosines: (number | null)[][];
            model: string;
            provenance: components["schemas"]["Provenance"];
            similar: components["schemas"]["SimilarVectors"];
            timing: components["schemas"]["Timing"];
            usage: components["schemas"]["Usage"];
            vector: components["schemas"]["VectorCard"];
        } & {
            [key: string]: unknown;
        };
        TrainRequest: {
            add_generation_prompt?: boolean | null;
            /** @enum {string} */
            bos?: "auto" | "always" | "never";
            chat_template_kwargs?: {
                [key: string]: unknown;
            } | null;
            continue_final_message?: boolean;
            harm_texts?: string[];
            hook?: string;
            layers?: number[] | null;
            max_harm?: number;
            /** @enum {string} */
            method?: "mean_difference" | "pca" | "logistic" | "lda";
            model?: string | null;
            name: string;
            overwrite?: boolean;
            pairs: components["schemas"]["ContrastPair"][];
            /** @enum {string} */
            read?: "last" | "mean" | "answer";
            /** @enum {string} */
            special_tokens?: "parse" | "text";
            tools?: components["schemas"]["Tool"][] | null;
            whiten?: boolean | string;
        };
        Usage: {
            cached_results?: number;
            cached_tokens?: number;
            generated_tokens?: number;
            prompt_tokens: number;
            scored_tokens: number;
        } & {
            [key: string]: unknown;
        };
        UsedAdapter: {
            name: string;
            sha256: string;
        } & {
            [key: string]: unknown;
        };
        UsedOverride: {
            cast?: "float32" | null;
            eta: number;
            name: string;
            sha256: string;
        } & {
            [key: string]: unknown;
        };
        UsedVector: {
            name: string | null;
            other_weights?: boolean;
            passed?: number | null;
            scale: number;
            sha256: string;
            tokens?: number | null;
        } & {
            [key: string]: unknown;
        };
        Validation: {
            caution?: string | null;
            folds?: number | null;
            reason?: string | null;
        } & {
            [key: string]: unknown;
        };
        VariantCard: {
            adapter?: string | null;
            bytes: number;
            chat_template_kwargs?: {
                [key: string]: unknown;
            } | null;
            created: string;
            description?: string | null;
            model: string;
            name: string;
            override?: components["schemas"]["ParameterOverride"] | null;
            sha256: string;
            steering?: {
                [key: string]: unknown;
            } | null;
        } & {
            [key: string]: unknown;
        };
        VariantRequest: {
            adapter?: string | null;
            chat_template_kwargs?: {
                [key: string]: unknown;
            } | null;
            description?: string | null;
            model?: string | null;
            override?: components["schemas"]["ParameterOverride"] | null;
            overwrite?: boolean;
            steering?: components["schemas"]["Steering"] | null;
        };
        VectorAbout: {
            format?: ("safetensors" | "gguf" | "pt") | null;
            method?: ("mean_difference" | "pca" | "logistic" | "lda") | null;
            model?: string | null;
            model_hint?: string | null;
            orthogonal_to?: components["schemas"]["VectorPart"][] | null;
            pairs?: number | null;
            parts?: components["schemas"]["VectorPart"][] | null;
            quality?: {
                [key: string]: components["schemas"]["LayerQuality"];
            } | null;
            read?: ("last" | "mean" | "answer") | null;
            recommendation?: components["schemas"]["Recommendation"] | null;
            /** @enum {string} */
            source: "upload" | "training" | "combination";
            validation?: components["schemas"]["Validation"] | null;
            weights_digest?: string | null;
            whiten?: boolean | string | null;
        } & {
            [key: string]: unknown;
        };
        VectorCard: {
            about: components["schemas"]["VectorAbout"];
            bytes: number;
            created: string;
            hook: string;
            layers: number[];
            name: string;
            norms: {
                [key: string]: number;
            };
            other_weights?: boolean;
            readouts?: {
                [key: string]: components["schemas"]["VectorReadout"];
            } | null;
            sha256: string;
            width: number;
        } & {
            [key: string]: unknown;
        };
        VectorList: {
            bytes: number;
            damaged?: string[];
            max_bytes: number;
            vectors: components["schemas"]["VectorCard"][];
        } & {
            [key: string]: unknown;
        };
        VectorPart: {
            name: string;
            sha256: string;
            weight?: number | null;
        } & {
            [key: string]: unknown;
        };
        VectorReadout: {
            bias: number;
            /** @enum {string} */
            kind: "logistic" | "relu";
            slope: number;
            threshold?: number;
        } & {
            [key: string]: unknown;
        };
        WeightedVector: {
            name: string;
            weight?: number;
        };
        WindowScore: {
            activations?: components["schemas"]["TokenActivations"] | null;
            end: number;
            num_scored: number;
            start: number;
            sum_logprob: number | null;
            sum_squared_logprob: number | null;
            text: number;
        } & {
            [key: string]: unknown;
        };
    };
    responses: never;
    parameters: never;
    requestBodies: never;
    headers: never;
    pathItems: never;
}
export type $defs = Record<string, never>;
export interface operations {
    reload_admin_reload_post: {
        parameters: {
            query?: {
                wait_s?: number;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ReloadAnswer"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    list_captures_captures_get: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["CaptureList"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    start_capture_captures_post: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["CaptureRequest"];
            };
        };
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["CaptureCard"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    show_capture_captures__name__get: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                name: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["CaptureCard"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    delete_capture_captures__name__delete: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                name: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Deleted"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    show_capture_index_captures__name__index_get: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                name: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["CaptureIndex"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    pause_capture_captures__name__pause_post: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                name: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["CaptureCard"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    resume_capture_captures__name__resume_post: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                name: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["CaptureCard"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    upload_capture_source_captures__name__source_put: {
        parameters: {
            query?: {
                overwrite?: boolean;
            };
            header?: never;
            path: {
                name: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/octet-stream": string;
            };
        };
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["CaptureSource"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    detokenize_detokenize_post: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["DetokenizeRequest"];
            };
        };
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["DetokenizeAnswer"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    generate_generate_post: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["GenerateRequest"];
            };
        };
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["GenerateAnswer"];
                    "application/msgpack": unknown;
                    "text/event-stream": unknown;
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    gradient_gradient_post: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["GradientRequest"];
            };
        };
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["GradientAnswer"];
                    "application/msgpack": unknown;
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    lens_lens_post: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["LensRequest"];
            };
        };
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["LensAnswer"];
                    "application/msgpack": unknown;
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    logprob_logprob_post: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["LogprobRequest"];
            };
        };
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["LogprobAnswer"];
                    "application/msgpack": unknown;
                    "application/vnd.safetensors": unknown;
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    list_models_models_get: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ModelList"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    drain_model_models__model_id__drain_post: {
        parameters: {
            query?: {
                wait_s?: number;
            };
            header?: never;
            path: {
                model_id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ModelCard"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    load_models__model_id__load_post: {
        parameters: {
            query?: {
                wait_s?: number;
            };
            header?: never;
            path: {
                model_id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ModelCard"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    selftest_models__model_id__selftest_post: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                model_id: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["SelftestRequest"];
            };
        };
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SelftestAnswer"];
                    "application/msgpack": unknown;
                    "text/event-stream": unknown;
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    unload_models__model_id__unload_post: {
        parameters: {
            query?: {
                wait_s?: number;
            };
            header?: never;
            path: {
                model_id: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["ModelCard"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    patch_patch_post: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["PatchRequest"];
            };
        };
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["PatchAnswer"];
                    "application/msgpack": unknown;
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    perplexity_perplexity_post: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["PerplexityRequest"];
            };
        };
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["PerplexityAnswer"];
                    "application/msgpack": unknown;
                    "text/event-stream": unknown;
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    list_saes_saes_get: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SaeList"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    show_sae_saes__name__get: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                name: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SaeCard"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    upload_sae_saes__name__put: {
        parameters: {
            query?: {
                layer?: number | null;
                activation_scale?: number | null;
                overwrite?: boolean;
            };
            header?: never;
            path: {
                name: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "multipart/form-data": {
                    /** Format: binary */
                    config: string;
                    /** Format: binary */
                    labels?: string;
                    /** Format: binary */
                    weights: string;
                };
            };
        };
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SaeCard"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    delete_sae_saes__name__delete: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                name: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Deleted"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    steer_steer_post: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["SteerRequest"];
            };
        };
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SteerAnswer"];
                    "application/msgpack": unknown;
                    "text/event-stream": unknown;
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    sweep_sweep_post: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["SweepRequest"];
            };
        };
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["SweepAnswer"];
                    "application/msgpack": unknown;
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    tokenize_tokenize_post: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["TokenizeRequest"];
            };
        };
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["TokenizeAnswer"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    show_variant_variants__name__get: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                name: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["VariantCard"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    put_variant_variants__name__put: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                name: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["VariantRequest"];
            };
        };
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["VariantCard"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    delete_variant_variants__name__delete: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                name: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Deleted"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    list_vectors_vectors_get: {
        parameters: {
            query?: {
                model?: string | null;
            };
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["VectorList"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    vectors_train_vectors_train_post: {
        parameters: {
            query?: never;
            header?: never;
            path?: never;
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["TrainRequest"];
            };
        };
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["TrainAnswer"];
                    "application/msgpack": unknown;
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    show_vector_vectors__name__get: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                name: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["VectorCard"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    upload_vector_vectors__name__put: {
        parameters: {
            query?: {
                format?: ("safetensors" | "gguf" | "pt") | null;
                overwrite?: boolean;
            };
            header?: never;
            path: {
                name: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/octet-stream": string;
            };
        };
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["VectorCard"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    delete_vector_vectors__name__delete: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                name: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["Deleted"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    combine_vector_vectors__name__combine_post: {
        parameters: {
            query?: never;
            header?: never;
            path: {
                name: string;
            };
            cookie?: never;
        };
        requestBody: {
            content: {
                "application/json": components["schemas"]["CombineRequest"];
            };
        };
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/json": components["schemas"]["VectorCard"];
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
    download_vector_vectors__name__content_get: {
        parameters: {
            query?: {
                format?: "safetensors" | "gguf";
            };
            header?: never;
            path: {
                name: string;
            };
            cookie?: never;
        };
        requestBody?: never;
        responses: {
            200: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/vnd.gguf": string;
                    "application/vnd.safetensors": string;
                };
            };
            default: {
                headers: {
                    [name: string]: unknown;
                };
                content: {
                    "application/problem+json": components["schemas"]["Problem"];
                };
            };
        };
    };
}
